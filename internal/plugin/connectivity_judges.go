package plugin

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/internal/probe"
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
func wholeSet(servers []string) func([]probe.Result) string {
	return func(results []probe.Result) string {
		got := map[string]bool{}
		for _, one := range results {
			got[one.Server] = true
		}
		if slices.Equal(slices.Sorted(maps.Keys(got)), slices.Sorted(slices.Values(servers))) {
			return ""
		}
		return fmt.Sprintf("expected answers of each of %s and nobody else; saw %s", strings.Join(servers, ", "), seen(results))
	}
}

// sameBackend requires that all attempts are answered by one of the servers.
func sameBackend(servers []string) func([]probe.Result) string {
	return func(results []probe.Result) string {
		for _, one := range results {
			if one.Server != results[0].Server || !slices.Contains(servers, one.Server) {
				return "expected answers of one backend only; saw " + seen(results)
			}
		}
		return ""
	}
}

// keptClient requires that the servers answer, and that each of them sees one of these addresses as
// the client's.
func keptClient(servers, addresses []string) func([]probe.Result) string {
	return func(results []probe.Result) string {
		for _, one := range results {
			if one.Outcome == probe.Answered && !slices.Contains(addresses, one.Client) {
				return fmt.Sprintf("expected the client's address, one of %s; the backend saw %s", strings.Join(addresses, ", "), one.Client)
			}
		}
		return wholeSet(servers)(results)
	}
}

// refused requires that nobody answers, and that attempts are refused and do not time out. Kernels
// limit how often they refuse, so one refusal is enough.
func refused(results []probe.Result) string {
	some := slices.ContainsFunc(results, func(one probe.Result) bool { return one.Outcome == probe.Refused })
	if some && unanswered(results) == "" {
		return ""
	}
	return "expected that it is refused; saw " + seen(results)
}

// unanswered requires that nobody answers.
func unanswered(results []probe.Result) string {
	if slices.ContainsFunc(results, func(one probe.Result) bool { return one.Outcome == probe.Answered }) {
		return "expected no answer; saw " + seen(results)
	}
	return ""
}

// resolved requires that a name has these addresses.
func resolved(addresses []string) func([]probe.Result) string {
	return func(results []probe.Result) string {
		got := slices.Sorted(slices.Values(results[0].Addresses))
		if want := slices.Sorted(slices.Values(addresses)); !slices.Equal(got, want) {
			return fmt.Sprintf("expected %s; saw %s %s", strings.Join(want, ", "), strings.Join(got, ", "), results[0].Error)
		}
		return ""
	}
}
