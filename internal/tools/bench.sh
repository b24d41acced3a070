#!/usr/bin/env bash
# Makes the figures of docs/performance.md again, one after the other: some hours. What the commands report is in bin/bench, and
# then, trimmed, in loadtest/performance/reports, of which the page is made, unless they would be of several machines. REPEATS is how often each load test is run, by
# default as often as its command says, or once. ONLY=steady makes only the reports whose names begin so; the page keeps the others. A run
# that fails does not end the rest: the page keeps the report that it had, what there is of the new one stays beside the others as
# NAME.failed.json, with what the run said in NAME.log, and this fails in the end.
set -euo pipefail
cd "$(dirname "$0")/../.."
list=loadtest/performance/commands.txt
mkdir -p bin/bench
go build -buildvcs=auto -o bin/slicecast-loadtest ./loadtest # whatever GOFLAGS has: reports tell the commit, and the page if they differ

# loadtest NAME COMMAND...: a load test, its report as JSON and as text.
loadtest() {
	local name=$1
	shift
	"bin/$1" "${@:2}" ${REPEATS:+--repeats="$REPEATS"} --output=json 2>&1 >"bin/bench/$name.json" </dev/null | tee "bin/bench/$name.log" >&2 &&
		bin/slicecast-loadtest show "bin/bench/$name.json" | tee "bin/bench/$name.txt"
}

failed=() measured=()
while IFS= read -r line; do
	name=${line%%: *}
	eval "command=(${line#*: })" # as a shell reads it: arguments may be quoted
	[[ $name == "${ONLY:-}"* ]] || continue
	rm -f "bin/bench/$name".{json,txt,log,failed.json,failed.txt}
	echo "== $name: ${command[*]}"
	if [[ ${command[0]} == go ]]; then
		"${command[@]}" | tee "bin/bench/$name.txt"
	else
		loadtest "$name" "${command[@]}"
	fi && measured+=("$name") || {
		failed+=("$name")
		for kind in json txt; do
			[[ ! -e bin/bench/$name.$kind ]] || mv "bin/bench/$name.$kind" "bin/bench/$name.failed.$kind"
		done
	}
done <"$list"
if ((${#measured[@]})); then
	go run ./internal/tools/performance bin/bench "${measured[@]}" || # those alone: others in bin/bench may be older than what is checked in
		failed+=(docs/performance.md)
fi
if ((${#failed[@]})); then
	echo "failed: ${failed[*]}; see above, bin/bench/NAME.failed.json and NAME.log" >&2
	exit 1
elif ! ((${#measured[@]})); then
	echo "nothing was measured: ONLY=${ONLY:-} begins no name in $list" >&2
	exit 1
fi
