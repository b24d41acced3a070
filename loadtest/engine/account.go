package engine

import (
	"context"
	"fmt"
	"time"

	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/loadtest/apiserver"
	"github.com/slicecast/slicecast/loadtest/report"
)

// accountTimeout is how long an API server may take to tell what it uses.
const accountTimeout = 10 * time.Second

// ask finds out whether a cluster's API server tells what it uses.
func (s *stack) ask(ctx context.Context, config *rest.Config) (err error) {
	if s.process, err = apiserver.NewProcess(config); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, accountTimeout)
	defer cancel()
	if _, s.untold = s.process.Account(ctx); s.untold != nil {
		s.process = nil
	}
	return nil
}

// account is what it has used so far; nil: it does not tell, or nobody asks.
func (s *stack) account(ctx context.Context) *apiserver.Account {
	if s.process == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, accountTimeout)
	defer cancel()
	a, err := s.process.Account(ctx)
	if err != nil {
		return nil
	}
	return &a
}

// serverCPU is what who distributes has used between two readings; nil: that is not known.
func (m *meter) serverCPU(before, after reading) *report.CPU {
	switch {
	case len(m.pids()) > 0:
		return new(report.CPUOf(after.server.Sub(before.server)))
	case before.account != nil && after.account != nil && before.account.Start == after.account.Start:
		return &report.CPU{Undivided: (after.account.CPU - before.account.CPU).Seconds()}
	}
	return nil
}

// explainCPU says in the report what the CPU time of a cluster's API server is, or why there is none.
func (r *repeat) explainCPU() {
	s := r.stack
	if s.untold != nil {
		r.result.Notes = append(r.result.Notes, fmt.Sprintf("the API server's CPU time is not known, as it does not tell it to this kubeconfig's user "+
			"(who needs to get the non-resource URL /metrics), and there is no --server-pid: %v", s.untold))
	}
	if s.process == nil {
		return
	}
	r.result.Notes = append(r.result.Notes, "the API server's CPU time is what it says in its metrics: of the one that answers, if there are several, with "+
		"all else that it does, such as answering that")
	for i := range r.result.Phases {
		if r.result.Phases[i].ServerCPU == nil {
			r.result.Notes = append(r.result.Notes, fmt.Sprintf("the API server's CPU time for %q is not known: another one answered at its end than at its "+
				"beginning, or none did, or it was started again", r.result.Phases[i].Name))
		}
	}
}
