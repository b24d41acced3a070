package plugin

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/show"
)

// maxExplained is how many failures are explained. The others point to those.
const maxExplained = 5

// explain adds to failures what explain says about their Services on their nodes.
func (r *connectivityRun) explain(ctx context.Context, results []scenarioResult) {
	type question struct{ node, service, from string }
	type explanation struct {
		reasons []string
		whole   json.RawMessage
	}
	known := make(map[question]explanation)
	for i := range results {
		s := &results[i]
		if s.State != scenarioFailed || s.Service == "" || ctx.Err() != nil {
			continue
		}
		q := question{s.Node, s.Service, s.From}
		e, ok := known[q]
		switch {
		case ok:
		case len(known) == maxExplained:
			e.reasons = []string{"not explained, as more than " + strconv.Itoa(maxExplained) + " failed; ask with explain"}
		default:
			e.reasons, e.whole = r.reasons(ctx, q.node, q.service, q.from)
			known[q] = e
		}
		s.Reasons, s.Explanation = append(s.Reasons, e.reasons...), e.whole
	}
}

// reasons returns what explain says about a Service on a node: in short, and all of it as JSON.
func (r *connectivityRun) reasons(ctx context.Context, node, service, from string) (reasons []string, whole json.RawMessage) {
	key, ok := model.ParseServiceKey(service)
	if !ok {
		return nil, nil
	}
	report, err := explain(ctx, r.fleet, explainQuestion{node: node, name: service, from: from, output: "json", service: key, timeout: r.timeout})
	if err != nil {
		return []string{"not explained: " + err.Error()}, nil
	}
	whole, err = show.JSON(report)
	if err != nil {
		return []string{"not explained: " + err.Error()}, nil
	}
	reasons = append(reasons, report.verdict...)
	for i, s := range report.steps {
		if s.State != stepAgrees && len(s.Why) > 0 {
			reasons = append(reasons, fmt.Sprintf("step %d of explain (%s) %s: %s", i+1, s.Name, s.State, s.Why[0]))
		}
	}
	if !slices.ContainsFunc(report.steps, func(s *step) bool { return s.State != stepAgrees }) && !report.refused && !report.others {
		reasons = append(reasons, "the node does with this Service what it should: look at routes, at network policies, and at the other node")
	}
	return reasons, whole
}
