#!/usr/bin/env bash
# Fuzzes every target of the module, one after the other, for $FUZZTIME each. A finding is stored as
# a test case in testdata/fuzz beside its target, so that the tests fail from then on. The script
# continues with the other targets and fails at the end.
set -uo pipefail
cd "$(dirname "$0")/../.."

mapfile -t targets < <(grep -rEo --include='*_test.go' '^func Fuzz[A-Za-z0-9_]*' . | sort)
echo "fuzzing ${#targets[@]} targets, each for $FUZZTIME"
failed=()
for target in "${targets[@]}"; do
	package=$(dirname "${target%%:*}") name=${target##* }
	echo "== $name in $package"
	# The time is for finding inputs, not for minimizing them. If the time ends while inputs are
	# being tried, go test may report an error (go.dev/issue/48157), which is not a finding.
	log=$(mktemp)
	if ! go test -run='^$' -fuzz="^$name\$" -fuzztime="$FUZZTIME" -fuzzminimizetime=20x "$package" 2>&1 | tee "$log"; then
		if grep -q 'context deadline exceeded' "$log" && ! grep -q 'Failing input written' "$log"; then
			echo "(the time is over)"
		else
			failed+=("$name in $package")
		fi
	fi
	rm "$log"
done
if ((${#failed[@]})); then
	printf 'fuzzing failed: %s\n' "${failed[@]}" >&2
	exit 1
fi
