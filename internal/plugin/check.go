package plugin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/show"
)

func newCheckCommand(o *options) *cobra.Command {
	out := &show.Options{Wide: true}
	var pre bool
	c := &cobra.Command{
		Use:   "check",
		Short: "Check what Slicecast needs, before and after it is installed",
		Long: `check looks for what Slicecast needs and does not have. With --pre it checks a cluster in which Slicecast is not
installed yet. Each failure says what to do, and which page has more. Warnings do not change the exit code.`,
		Example: `  kubectl slicecast check --pre
  kubectl slicecast check
  kubectl slicecast check -o wide   # also what was found to be right`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return o.run(c, out, func(ctx context.Context, f *fleet.Fleet) (report, error) { return check(ctx, f, pre) })
		},
	}
	addOutputFlags(c, out)
	c.Flags().BoolVar(&pre, "pre", false, "Check the cluster before Slicecast is installed.")
	return c
}

// The results of checks, worst first.
const (
	failed     = "failed"
	notChecked = "not checked"
	warning    = "warning"
	passed     = "ok"
	// note is for what was not looked at because nobody asked for it, and for what works.
	note = "note"
)

// finding is what a check has found.
type finding struct {
	Check   string `json:"check"`
	Result  string `json:"result"`
	Subject string `json:"subject,omitempty"` // the node, server or object
	Found   string `json:"found"`
	// Do says what to do, and Link which page has more. Both are empty if nothing is to be done.
	Do   string `json:"do,omitempty"`
	Link string `json:"link,omitempty"`
}

// pages is where the documentation is.
const pages = "https://github.com/slicecast/slicecast/blob/main/"

// checkReport is the report of check.
type checkReport struct {
	findings []finding
}

// checks collects the findings of checks.
type checks struct {
	name string // the current check
	link string // the page about it, from the root of the repository
	list []finding
}

// begin begins a check.
func (c *checks) begin(name, link string) { c.name, c.link = name, pages+link }

func (c *checks) ok(subject, found string, args ...any) {
	c.list = append(c.list, finding{Check: c.name, Result: passed, Subject: subject, Found: fmt.Sprintf(found, args...)})
}

// bad adds a finding after which there is something to do.
func (c *checks) bad(result, subject, found, do string) {
	c.list = append(c.list, finding{Check: c.name, Result: result, Subject: subject, Found: found, Do: do, Link: c.link})
}

// unknown adds that something could not be checked.
func (c *checks) unknown(subject string, err error) {
	do := "check again; if that does not help, look at the API server: kubectl get --raw /readyz?verbose"
	switch {
	case apierrors.IsForbidden(err):
		do = "get the rights that docs/kubectl.md lists, and check again"
	case apierrors.IsUnauthorized(err):
		do = "log in again: the API server does not accept the credentials of your kubeconfig"
	case apierrors.IsNotFound(err):
		do = "look for what is missing by hand: it is what this check reads"
	case errors.Is(err, fleet.ErrTimeout):
		do = "check again with a longer --timeout"
	}
	c.bad(notChecked, subject, err.Error(), do)
}

// check checks a cluster, with pre before an installation.
func check(ctx context.Context, f *fleet.Fleet, pre bool) (*checkReport, error) {
	c := &checks{}
	cluster := readCluster(ctx, f)
	cluster.checkAPIServer(c)
	cluster.checkIssuer(ctx, c)
	cluster.checkNodes(c)
	cluster.checkClocks(c)
	if pre {
		cluster.checkRights(ctx, c)
		cluster.checkPodRanges(ctx, c)
		cluster.checkPorts(c)
		cluster.checkProxies(ctx, c, nil)
		c.begin("modules", "docs/adopt.md#node-by-node")
		c.bad(note, "", "the kernels' modules were not looked at, because the API server does not know them",
			"begin with one node of each kernel: its agent tries the kernel, and says in check what it lacks")
	} else if err := checkFleet(ctx, f, cluster, c); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	return &checkReport{c.list}, nil
}

// has returns how many findings have a result.
func (r *checkReport) has(result string) (n int) {
	for _, f := range r.findings {
		if f.Result == result {
			n++
		}
	}
	return n
}

// code implements report.
func (r *checkReport) code() int {
	switch {
	case r.has(notChecked) > 0:
		return incomplete
	case r.has(failed) > 0:
		return wrong
	}
	return fine
}

// Fields implements show.Report.
func (r *checkReport) Fields() []show.Field {
	return []show.Field{{Name: "findings", Value: nonNil(r.findings)}}
}

// Print implements show.Report.
func (r *checkReport) Print(out *show.Page) {
	if out.Wide && r.has(passed) > 0 {
		out.Row("CHECK", "SUBJECT", "FOUND")
		for _, f := range r.findings {
			if f.Result == passed {
				out.Row(f.Check, f.Subject, f.Found)
			}
		}
	}
	for _, result := range []string{failed, notChecked, warning, note} {
		r.printFindings(out, result)
	}
	out.Title("%d ok, %s, %d failed, %d not checked", r.has(passed), show.Plural("warning", r.has(warning)), r.has(failed), r.has(notChecked))
}

// printFindings prints the findings with a result. Those about several subjects that are the same
// otherwise are printed once.
func (r *checkReport) printFindings(out *show.Page, result string) {
	type same struct{ check, found, do, link string }
	subjects := make(map[same][]string)
	var order []same
	for _, f := range r.findings {
		if f.Result != result {
			continue
		}
		key := same{f.Check, f.Found, f.Do, f.Link}
		if _, ok := subjects[key]; !ok {
			order = append(order, key)
		}
		subjects[key] = append(subjects[key], f.Subject)
	}
	for _, key := range order {
		text := key.found
		if about := subjectsText(subjects[key]); about != "" {
			text = about + ": " + text
		}
		out.Title("%s: %s: %s", strings.ToUpper(result), key.check, text)
		out.Row("  do", key.do)
		out.Row("  see", key.link)
	}
}

// shownSubjects is how many subjects of one finding are named.
const shownSubjects = 5

func subjectsText(subjects []string) string {
	subjects = slices.Compact(slices.DeleteFunc(slices.Clone(subjects), func(s string) bool { return s == "" }))
	text := strings.Join(subjects[:min(len(subjects), shownSubjects)], ", ")
	if n := len(subjects) - shownSubjects; n > 0 {
		text += fmt.Sprintf(" and %d more", n)
	}
	return text
}
