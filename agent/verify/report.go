package verify

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/slicecast/slicecast/internal/show"
)

// pause is the time between two comparisons while there are differences.
const pause = time.Second

// Settled compares the kernel with a state again and again while there are differences, but not for
// longer than settle. It returns the differences that all comparisons have found.
func Settled(ctx context.Context, o Options, settle time.Duration) (Result, error) {
	deadline := time.Now().Add(settle)
	var common Result
	for first := true; ; first = false {
		r, err := Kernel(ctx, o)
		if err != nil {
			return r, err
		}
		if !first {
			r = r.Both(common)
		}
		common = r
		if len(r.Differences) == 0 || !time.Now().Before(deadline) {
			return common, nil
		}
		select {
		case <-ctx.Done():
			return common, ctx.Err()
		case <-time.After(min(pause, time.Until(deadline))):
		}
	}
}

// Report is a result that the command verify prints.
type Report struct {
	Result

	Node string
}

// maxShown is how many differences a report has, and how many reasons why something is not judged.
// A kernel without rules differs in everything.
const maxShown = 1000

// shown are the differences that a report has, with their sentences.
func (r *Report) shown() (out []shownDifference) {
	out = []shownDifference{}
	for _, d := range r.Differences[:min(len(r.Differences), maxShown)] {
		out = append(out, shownDifference{d, d.String()})
	}
	return out
}

type shownDifference struct {
	Difference

	Text string `json:"text"`
}

// Fields implements show.Report.
func (r *Report) Fields() []show.Field {
	return []show.Field{
		{Name: "node", Value: r.Node}, {Name: "frontends", Value: r.Frontends}, {Name: "packets", Value: r.Packets},
		{Name: "total", Value: len(r.Differences)}, {Name: "differences", Value: r.shown()},
		{Name: "tolerated", Value: r.Tolerated},
		{Name: "facts", Value: append([]string{}, r.Facts...)},
		{Name: "unjudged", Value: append([]string{}, r.Unjudged...)},
	}
}

// Print implements show.Report.
func (r *Report) Print(out *show.Page) {
	out.Row("Node", r.Node)
	out.Row("Compared", show.Plural("frontend", r.Frontends)+", "+show.Plural("packet", r.Packets))
	out.Row("Differences", strconv.Itoa(len(r.Differences)))
	if r.Tolerated > 0 {
		out.Row("Tolerated", show.Plural("packet", r.Tolerated)+" that kube-proxy's mode treats in its own way; see the facts")
	}
	if len(r.Differences) > 0 {
		out.Title("Differences:")
		for _, d := range r.shown() {
			out.Row(d.Text)
		}
		if more := len(r.Differences) - maxShown; more > 0 {
			out.Row(fmt.Sprintf("… and %d more", more))
		}
	}
	if len(r.Facts) > 0 {
		out.Title("Facts:")
		for _, f := range r.Facts {
			out.Row(f)
		}
	}
	if len(r.Unjudged) > 0 {
		out.Title("Not judged:")
		for _, u := range r.Unjudged {
			out.Row(u)
		}
	}
}
