#!/usr/bin/env bash
# Checks Markdown and comments: their width, sentences, words and spelling. golangci-lint checks the
# spelling of Go files, and the form of their comments.
set -euo pipefail
cd "$(dirname "$0")/../.."

go test -count 1 ./internal/tools/prose
misspell=$(internal/tools/build.sh internal/tools/lint github.com/golangci/misspell/cmd/misspell)
git ls-files -z '*.md' '*.proto' '*.sh' '*.tmpl' '*.yaml' | xargs -0 "$misspell" -locale US -error
