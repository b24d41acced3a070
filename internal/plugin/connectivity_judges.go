package plugin

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/slicecast/slicecast/internal/probe"
	"github.com/slicecast/slicecast/internal/show"
)

// seen describes results: which servers have answered how often, and what else became of attempts.
func seen(results []probe.Result) string {
	counts := map[string]int{}
	var example string
	for _, one := range results {
		if one.Outcome == probe.Answered {
			counts["answered by "+one.Server]++
			continue
		}
		counts[string(one.Outcome)]++
		example = one.Error
	}
	var parts []string
	for _, what := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%s: %d", what, counts[what]))
	}
	text := strings.Join(parts, ", ")
	if example != "" {
		text += " (" + example + ")"
	}
	return text
}

// wholeSet requires that all attempts are answered, by each of the servers and by nobody else.
func wholeSet(servers []string) judge {
	return judge{"an answer of one of " + strings.Join(servers, ", "), func(results []probe.Result) string {
		got := map[string]bool{}
		for _, one := range results {
			got[one.Server] = true
		}
		if slices.Equal(slices.Sorted(maps.Keys(got)), slices.Sorted(slices.Values(servers))) {
			return ""
		}
		return fmt.Sprintf("expected answers of each of %s and nobody else; saw %s", strings.Join(servers, ", "), seen(results))
	}}
}

// sameBackend requires that all attempts are answered by one of the servers.
func sameBackend(servers []string) judge {
	return judge{"an answer of the same one of " + strings.Join(servers, ", "), func(results []probe.Result) string {
		for _, one := range results {
			if one.Server != results[0].Server || !slices.Contains(servers, one.Server) {
				return "expected answers of one backend only; saw " + seen(results)
			}
		}
		return ""
	}}
}

// keptClient requires answers of all servers, which must see one of the client's own addresses.
func keptClient(servers, addresses []string) judge {
	whole := wholeSet(servers)
	return judge{whole.expected + " to the client " + strings.Join(addresses, " or "), func(results []probe.Result) string {
		for _, one := range results {
			if one.Outcome == probe.Answered && !slices.Contains(addresses, one.Client) {
				return fmt.Sprintf("expected the client's address, one of %s; the backend saw %s", strings.Join(addresses, ", "), one.Client)
			}
		}
		return whole.wrong(results)
	}}
}

// refused requires that nobody answers, and that attempts are refused and do not time out. Kernels
// limit how often they refuse, so one refusal is enough.
var refused = judge{"a refusal", func(results []probe.Result) string {
	some := slices.ContainsFunc(results, func(one probe.Result) bool { return one.Outcome == probe.Refused })
	if some && unanswered.wrong(results) == "" {
		return ""
	}
	return "expected that it is refused; saw " + seen(results)
}}

// unanswered requires that nobody answers.
var unanswered = judge{"no answer", func(results []probe.Result) string {
	if slices.ContainsFunc(results, func(one probe.Result) bool { return one.Outcome == probe.Answered }) {
		return "expected no answer; saw " + seen(results)
	}
	return ""
}}

// resolved requires that a name has these addresses.
func resolved(addresses []string) judge {
	return judge{"the addresses " + strings.Join(addresses, ", "), func(results []probe.Result) string {
		got := slices.Sorted(slices.Values(results[0].Addresses))
		if want := slices.Sorted(slices.Values(addresses)); !slices.Equal(got, want) {
			return fmt.Sprintf("expected %s; saw %s %s", strings.Join(want, ", "), strings.Join(got, ", "), results[0].Error)
		}
		return ""
	}}
}

// slowness says which answers were slow, or returns an empty string. A slow answer has come from
// where it should, so it says nothing of the rules: packets were lost, or a machine is busy.
func slowness(results []probe.Result) string {
	slow, longest := 0, time.Duration(0)
	for _, one := range results {
		if one.Outcome == probe.Answered && one.Took > slowAnswer {
			slow, longest = slow+1, max(longest, one.Took)
		}
	}
	if slow == 0 {
		return ""
	}
	return fmt.Sprintf("%d of %s took more than %v, the longest %v: packets were lost, or a machine is busy", slow, show.Plural("answer", len(results)), slowAnswer, longest.Round(time.Millisecond))
}
