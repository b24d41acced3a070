package plugin

import (
	"fmt"
	"time"

	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/show"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// staleness says which servers may lack changes, by their epochs.
type staleness map[uint64]lapse

// lapse is for how long a server's state has been stale, and why.
type lapse struct {
	lasting time.Duration
	reason  string
}

// findStale returns the servers that say themselves that they may lack changes, relays of such a
// server that was not asked, and those that
// have not seen a change that another server published more than slowChange ago. A server whose
// watch hangs does not know that it lacks something.
func findStale(answers []fleet.Answer[*pb.GetStatusResponse]) staleness {
	out := make(staleness)
	for _, a := range answers {
		if a.Err != nil {
			continue
		}
		s := a.Value
		switch up, source := s.GetUpstream(), s.GetSource(); {
		case up != nil && !up.GetConnected():
			reason := "it follows no server"
			if up.GetLastError() != "" {
				reason += ": " + up.GetLastError()
			}
			out[s.GetEpoch()] = lapse{max(1, since(s, up.GetStaleSince().AsTime())), reason}
		case source.GetStaleSince() != nil:
			lasting := max(1, since(s, source.GetStaleSince().AsTime()))
			out[s.GetEpoch()] = lapse{lasting, fmt.Sprintf("it may lack changes of the last %s, because its API server does not answer: %s",
				show.Age(lasting), source.GetLastError())}
		}
	}
	for _, a := range answers {
		// The server that a relay follows may not have been asked.
		if server := a.Value.GetUpstream().GetServer(); a.Err == nil && server.GetStaleSince() != nil && out.of(a.Value) == 0 {
			lasting := max(1, since(a.Value, server.GetStaleSince().AsTime()))
			out[a.Value.GetEpoch()] = lapse{lasting, fmt.Sprintf("it may lack changes of the last %s, because the server that it follows "+
				"says the same of itself: %s", show.Age(lasting), server.GetName())}
		}
	}
	for _, c := range mergeChanges(answers) {
		for _, u := range c.unseen {
			if _, known := out[u.epoch]; known && out[u.epoch].lasting >= c.age || c.age <= slowChange {
				continue
			}
			out[u.epoch] = lapse{c.age, fmt.Sprintf("it has not seen a change that %s published %s ago: its watch may hang",
				c.Servers[0].Server, show.Age(c.age))}
		}
	}
	return out
}

// of returns for how long a server's state has been stale. A relay's state is as stale as that of
// the servers that it has passed through. It returns 0 if the state is not stale.
func (s staleness) of(status *pb.GetStatusResponse) (longest time.Duration) {
	longest = s[status.GetEpoch()].lasting
	for _, epoch := range status.GetUpstream().GetPath() {
		longest = max(longest, s[epoch].lasting)
	}
	return longest
}

// as returns answers with another value.
func as[T, U any](answers []fleet.Answer[T], value func(T) U) (out []fleet.Answer[U]) {
	for _, a := range answers {
		b := fleet.Answer[U]{Server: a.Server, Err: a.Err, Sent: a.Sent, Received: a.Received}
		if a.Err == nil {
			b.Value = value(a.Value)
		}
		out = append(out, b)
	}
	return out
}

// statuses returns the status of each server that has listed its clients.
func statuses(answers []fleet.Answer[agents]) []fleet.Answer[*pb.GetStatusResponse] {
	return as(answers, func(a agents) *pb.GetStatusResponse { return a.status })
}
