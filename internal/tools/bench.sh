#!/usr/bin/env bash
# Measures everything in docs/performance.md and the pages behind it again, one after the other, and
# writes these pages. This takes about six hours on two CPUs.
#
# The commands write their reports to bin/bench. The trimmed reports then go to
# loadtest/performance/reports, from which the pages are generated, unless the reports would come
# from different machines. All of them are of one commit, so the work tree must be clean.
#
# REPEATS is how often each load test runs; by default it runs as often as its command says, or
# once. ONLY=steady measures only the reports whose names begin with "steady", in any work tree; the
# pages keep the others.
#
# If a run fails, the others continue. The pages keep the previous report of the failed run, and its
# incomplete report is in bin/bench as NAME.failed.json, with its log in NAME.log. The script fails
# at the end.
set -euo pipefail
cd "$(dirname "$0")/../.."
list=loadtest/performance/commands.txt
mkdir -p bin/bench
# Reports contain the commit. -buildvcs=auto overrides GOFLAGS.
go build -buildvcs=auto -o bin/slicecast-loadtest ./loadtest
commit=$(go version -m bin/slicecast-loadtest | awk '$1 == "mod" { print $3 }')
if [[ -z ${ONLY:-} ]]; then
	case $commit in
	*+dirty) echo "the work tree has changes that are in no commit: commit them first" >&2 && exit 1 ;;
	v*) ;;
	*) echo "go build does not find the commit: measure in a clone rather than in a worktree of another one" >&2 && exit 1 ;;
	esac
fi

# loadtest NAME COMMAND... runs a load test and writes its report as JSON and as text.
loadtest() {
	local name=$1
	shift
	"bin/$1" "${@:2}" ${REPEATS:+--repeats="$REPEATS"} --output=json 2>&1 >"bin/bench/$name.json" </dev/null | tee "bin/bench/$name.log" >&2 &&
		bin/slicecast-loadtest show "bin/bench/$name.json" | tee "bin/bench/$name.txt"
}

failed=() measured=()
while IFS= read -r line; do
	name=${line%%: *}
	eval "command=(${line#*: })" # arguments may be quoted as in a shell
	[[ $name == "${ONLY:-}"* ]] || continue
	rm -f "bin/bench/$name".{json,txt,log,failed.json,failed.txt}
	echo "== $name: ${command[*]}"
	if [[ ${command[0]} == go ]]; then
		(echo "commit: $commit" && "${command[@]}") | tee "bin/bench/$name.txt"
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
	# Only these reports: others in bin/bench may be older than those that are checked in.
	go run ./internal/tools/performance bin/bench "${measured[@]}" ||
		failed+=(docs/performance.md)
fi
if ((${#failed[@]})); then
	echo "failed: ${failed[*]}; see above, bin/bench/NAME.failed.json and NAME.log" >&2
	exit 1
elif ! ((${#measured[@]})); then
	echo "nothing was measured: no name in $list begins with ONLY=${ONLY:-}" >&2
	exit 1
fi
