package verify

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/agent/trace"
)

// Difference is something that the kernel does and that it should not do, or the other way round.
type Difference struct {
	// Service, Frontend and Source say for which packets. They are empty if no Service is
	// concerned.
	Service  string `json:"service,omitempty"`
	Frontend string `json:"frontend,omitempty"`
	Source   string `json:"source,omitempty"`
	// Wanted and Found are what should happen and what happens, each with a verb.
	Wanted string `json:"wanted"`
	Found  string `json:"found"`
	// Rule is the last rule that has decided this, or the place of what is found.
	Rule string `json:"rule,omitempty"`
}

// String returns the difference as a sentence.
func (d Difference) String() string {
	var b strings.Builder
	if d.Service != "" {
		fmt.Fprintf(&b, "%s: ", d.Service)
	}
	if d.Frontend != "" {
		fmt.Fprintf(&b, "what comes to %s ", d.Frontend)
	}
	if d.Source != "" {
		fmt.Fprintf(&b, "from %s ", d.Source)
	}
	if b.Len() == 0 {
		b.WriteString("there ")
	}
	fmt.Fprintf(&b, "should %s, but %s", d.Wanted, d.Found)
	if d.Rule != "" {
		fmt.Fprintf(&b, "; see %s", d.Rule)
	}
	return b.String()
}

// Result is the result of a comparison.
type Result struct {
	Differences []Difference `json:"differences"`
	// Unjudged are what could not be judged, each with the reason. There are at most maxShown of
	// them.
	Unjudged []string `json:"unjudged,omitempty"`
	// Facts are what rules of others and modes of kube-proxy do to packets of Services that is no
	// difference.
	Facts []string `json:"facts,omitempty"`
	// Tolerated counts packets that the mode treats in another way than the view, on purpose. Facts
	// say in which.
	Tolerated int `json:"tolerated"`
	// Frontends and Packets count what was compared.
	Frontends int `json:"frontends"`
	Packets   int `json:"packets"`
}

// Merge adds another result.
func (r *Result) Merge(o Result) {
	r.Differences = append(r.Differences, o.Differences...)
	r.cannotJudge(o.Unjudged...)
	r.Facts = append(r.Facts, o.Facts...)
	r.Tolerated += o.Tolerated
	r.Frontends += o.Frontends
	r.Packets += o.Packets
}

// Both returns the result with only those of its differences that an earlier result has, too. What
// was on its way into the kernel when one of them was made is not a difference.
func (r Result) Both(earlier Result) Result {
	known := make(map[about]struct{}, len(earlier.Differences))
	for _, d := range earlier.Differences {
		known[d.about()] = struct{}{}
	}
	r.Differences = slices.DeleteFunc(slices.Clone(r.Differences), func(d Difference) bool {
		_, also := known[d.about()]
		return !also
	})
	return r
}

// cannotJudge adds to what cannot be judged, up to a bound.
func (r *Result) cannotJudge(reasons ...string) {
	for _, reason := range reasons {
		switch {
		case len(r.Unjudged) < maxShown-1:
			r.Unjudged = append(r.Unjudged, reason)
		case len(r.Unjudged) == maxShown-1:
			r.Unjudged = append(r.Unjudged, "more than can be listed")
		}
	}
}

// about is what a difference is about: the packets or, without a Service, what is wanted. What is
// wanted and found for the same packets may change while a Service changes.
type about struct{ service, frontend, source, wanted string }

// about returns what a difference is about.
func (d Difference) about() about {
	a := about{service: d.Service, frontend: d.Frontend, source: d.Source}
	if d.Service == "" {
		a.wanted = d.Wanted
	}
	return a
}

// maxBackendsShown is how many backends a difference names.
const maxBackendsShown = 5

// describe says in words what happens to packets.
func describe(out []trace.Outcome) string {
	var backends, others []string
	masqueraded := 0
	for _, o := range out {
		switch {
		case o.Verdict != trace.Pass:
			others = append(others, o.Verdict.String())
		case o.Backend.IsValid():
			backends = append(backends, o.Backend.String())
			if o.Masquerade {
				masqueraded++
			}
		case o.UntrackedBy != nil:
			others = append(others, "is not translated, because conntrack does not track it")
		default:
			others = append(others, "is not translated")
		}
	}
	slices.Sort(others)
	others = slices.Compact(others)
	if len(backends) > 0 {
		text := "leads to " + list(backends)
		if masqueraded == len(backends) {
			text += ", masqueraded"
		}
		others = append(others, text)
	}
	return cmp.Or(strings.Join(others, " or "), "nothing happens")
}

// list joins some of the words.
func list(words []string) string {
	if rest := len(words) - maxBackendsShown; rest > 1 {
		return strings.Join(words[:maxBackendsShown], ", ") + fmt.Sprintf(" and %d others", rest)
	}
	return strings.Join(words, ", ")
}

func count(n int, word string) string {
	if n == 1 {
		return "1 " + word
	}
	return fmt.Sprintf("%d %ss", n, word)
}
