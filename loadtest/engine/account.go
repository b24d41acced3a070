package engine

import (
	"context"
	"time"

	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/loadtest/apiserver"
	"github.com/slicecast/slicecast/loadtest/report"
)

// accountTimeout is how long an API server may take to report its CPU time.
const accountTimeout = 10 * time.Second

// ask checks whether an existing cluster's API server reports its CPU time. If so, it sets process;
// otherwise it sets untold.
func (s *stack) ask(ctx context.Context, client rest.Interface) {
	s.process = client
	ctx, cancel := context.WithTimeout(ctx, accountTimeout)
	defer cancel()
	if _, s.untold = apiserver.ReadAccount(ctx, client); s.untold != nil {
		s.process = nil
	}
}

// account returns the CPU time that the API server has used so far. It returns nil if the API
// server does not report it or must not be asked.
func (s *stack) account(ctx context.Context) *apiserver.Account {
	if s.process == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, accountTimeout)
	defer cancel()
	a, err := apiserver.ReadAccount(ctx, s.process)
	if err != nil {
		return nil
	}
	return &a
}

// serverCPU returns the CPU time that the peer used between two readings, or nil if it is unknown.
func (m *meter) serverCPU(before, after reading) *report.CPU {
	switch {
	case len(m.pids()) > 0:
		return new(report.CPUOf(after.server.Sub(before.server)))
	case before.account != nil && after.account != nil && before.account.Start == after.account.Start:
		return &report.CPU{Undivided: (after.account.CPU - before.account.CPU).Seconds()}
	}
	return nil
}

// explainCPU adds notes that say what the CPU time of an existing cluster's API server covers, or
// why it is unknown.
func (r *repeat) explainCPU() {
	s := r.stack
	r.note(s.untold != nil, "the API server's CPU time is unknown: reading /metrics failed, and there is no --server-pid "+
		"(the kubeconfig's user needs the permission to get the non-resource URL /metrics): %v", s.untold)
	if s.process == nil {
		return
	}
	r.note(true, "the API server's CPU time is from its metrics. If there are several API servers, it is that of the one "+
		"that answered. It includes all else that this API server did, such as answering these requests")
	for _, p := range r.result.Phases {
		r.note(p.ServerCPU == nil, "the API server's CPU time for %q is unknown: the API server did not answer, was restarted, "+
			"or was not the same one at the start and at the end", p.Name)
	}
}
