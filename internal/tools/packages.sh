#!/usr/bin/env bash
# Installs the Debian packages whose commands or files are missing, if it runs as root on a Debian
# system. Otherwise it prints the missing packages and fails.
# Usage: packages.sh <command or absolute path>:<package>...
set -euo pipefail

missing=()
for pair; do
	[[ $pair == /* && -e ${pair%%:*} ]] || command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
((${#missing[@]})) || exit 0
if [[ $EUID != 0 ]] || ! command -v apt-get >/dev/null; then
	echo "missing: ${missing[*]}; on Debian or Ubuntu run 'apt-get install ${missing[*]}' as root" >&2
	exit 1
fi
apt-get -q update
DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "${missing[@]}"
