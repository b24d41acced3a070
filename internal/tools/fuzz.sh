#!/usr/bin/env bash
# Fuzzes every target of the module, one after the other, each for $FUZZTIME. A finding is kept as a test case in testdata/fuzz
# beside its target, fails this script once the others have had their turn, and from then on the tests.
set -uo pipefail
cd "$(dirname "$0")/../.."

mapfile -t targets < <(grep -rEo --include='*_test.go' '^func Fuzz[A-Za-z0-9_]*' . | sort)
echo "fuzzing ${#targets[@]} targets, each for $FUZZTIME"
failed=()
for target in "${targets[@]}"; do
	package=$(dirname "${target%%:*}") name=${target##* }
	echo "== $name in $package"
	# Making inputs smaller is not what the time is for. A run's end while inputs are tried can be an error of its own
	# (go.dev/issue/48157), and is no finding.
	log=$(mktemp)
	if ! go test -run='^$' -fuzz="^$name\$" -fuzztime="$FUZZTIME" -fuzzminimizetime=20x "$package" 2>&1 | tee "$log"; then
		if grep -q 'context deadline exceeded' "$log" && ! grep -q 'Failing input written' "$log"; then
			echo "(the time was over)"
		else
			failed+=("$name in $package")
		fi
	fi
	rm "$log"
done
if ((${#failed[@]})); then
	printf 'found something: %s\n' "${failed[@]}" >&2
	exit 1
fi
