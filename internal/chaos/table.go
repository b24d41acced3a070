package chaos

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Table returns a Markdown table of several runs: what each fault cost each of them. A fault that
// came several times has one row, with the sum of its requests and the longest time.
func Table(reports ...*Report) string {
	var out strings.Builder
	row := func(first string, cell func(*Report) string) {
		out.WriteString("| " + first)
		for _, r := range reports {
			out.WriteString(" | " + cell(r))
		}
		out.WriteString(" |\n")
	}
	row("", func(r *Report) string { return fmt.Sprintf("%s (%s), seed %d", r.Proxy, r.Programmer, r.Seed) })
	out.WriteString("| ---" + strings.Repeat(" | ---", len(reports)) + " |\n")
	row("no fault, no churn: at the end", func(r *Report) string { return r.Calm.Counts.cell() })
	row("no fault", func(r *Report) string { return r.Baseline.Counts.Plus(r.Quiet.Counts).cell() })
	for _, f := range faultNames(reports) {
		row("`"+f+"`", func(r *Report) string { return r.cell(f) })
	}
	row("**all**", func(r *Report) string {
		return fmt.Sprintf("%s of %d requests in %s", r.Sum().cell(), r.Sum().Requests, time.Duration(r.Took*float64(time.Second)).Round(time.Second))
	})
	return out.String()
}

// faultNames returns the faults of the reports, those that came first in any report first.
func faultNames(reports []*Report) (names []string) {
	var steps []*StepResult
	for _, r := range reports {
		steps = append(steps, r.Steps...)
	}
	slices.SortStableFunc(steps, func(a, b *StepResult) int { return cmp.Compare(a.At, b.At) })
	for _, s := range steps {
		if !slices.Contains(names, s.Fault) {
			names = append(names, s.Fault)
		}
	}
	return names
}

// cell returns what a fault cost.
func (r *Report) cell(fault string) string {
	var sum Counts
	var verified float64
	hit, converged := false, true
	for _, s := range r.Steps {
		if s.Fault == fault && !s.Skipped {
			hit, converged = true, converged && s.Unconverged == ""
			sum, verified = sum.Plus(s.Counts), max(verified, s.Verified)
		}
	}
	switch {
	case !hit:
		return "-"
	case !converged:
		return sum.cell() + "; **not converged**"
	}
	return fmt.Sprintf("%s; %.1f s", sum.cell(), verified)
}

func (c Counts) cell() string { return fmt.Sprintf("%d / %d / %d", c.Lost(), c.Misrouted, c.Broken) }
