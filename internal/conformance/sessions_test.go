// This file makes the connections of a case's sessions one after the other, with their pauses, and
// judges at which backends they arrive.
package conformance

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"
)

// checkSessions makes the connections of a step's sessions. Sessions with pauses run concurrently
// with the others.
func (s *stage) checkSessions(t *testing.T, c *Case, step *Step, exceptions exceptions, report func(string, error)) {
	t.Helper()
	reached := make([][]netip.AddrPort, len(step.Sessions))
	errs := make([]error, len(step.Sessions))
	var long sync.WaitGroup
	for i := range step.Sessions {
		session := &step.Sessions[i]
		run := func() { reached[i], errs[i] = s.runSession(t.Context(), session) }
		if session.IntervalSeconds > 0 {
			long.Go(run)
		} else {
			run()
		}
	}
	long.Wait()
	groups := map[string]netip.AddrPort{}
	for i := range step.Sessions {
		session := &step.Sessions[i]
		name := fmt.Sprintf("session %q", session.Name)
		if errs[i] == nil {
			errs[i] = session.judge(reached[i])
		}
		report(name, errs[i])
		group := session.Group
		if s.subject.Mode() == IPVS && session.GroupIPVS != "" &&
			(s.subject.Reference() || exceptions.find(IPVS, c.ID, step.Name, session.Name) != nil) {
			group = session.GroupIPVS
		}
		if errs[i] != nil || group == "" {
			continue
		}
		if first, ok := groups[group]; ok && first != reached[i][0] {
			report(name, fmt.Errorf("it reaches %s, but an earlier session of group %s reached %s", reached[i][0], group, first))
		}
		groups[group] = reached[i][0]
	}
}

// certainty is how many connections must all reach one of two or more backends until that is taken
// for a rule. By chance, they do so once in half a million runs or less.
const certainty = 20

// runSession makes the connections one after the other and returns where they arrived. If chance
// may be why too few backends are reached, there are more connections than the session says.
func (s *stage) runSession(ctx context.Context, session *Session) ([]netip.AddrPort, error) {
	var reached []netip.AddrPort
	for i, o := range s.openings(&session.Connections, max(session.Count, certainty)) {
		if session.suffices(reached) {
			break
		}
		if i > 0 && session.IntervalSeconds > 0 {
			select {
			case <-ctx.Done():
				return nil, ctx.Err()
			case <-time.After(session.Interval()):
			}
		}
		// The timeout is long, because each connection is answered and a slow machine may take a
		// while for that.
		fates, err := s.wire.Open(ctx, []Opening{o}, settleTimeout())
		if err != nil {
			return nil, err
		}
		if fates[0].At == nil || !fates[0].Answered {
			return nil, fmt.Errorf("connection %d: %s", i, describe(fates))
		}
		reached = append(reached, fates[0].SeenDst)
	}
	return reached, nil
}

// suffices reports whether no more connections are needed to judge a session.
func (s *Session) suffices(reached []netip.AddrPort) bool {
	return len(reached) >= s.Count && (len(reached) >= certainty || len(distinct(reached)) >= s.Expect.DistinctMin)
}

// judge returns an error if the places where a session's connections arrived are not as expected.
func (s *Session) judge(reached []netip.AddrPort) error {
	for i, r := range reached {
		if !slices.Contains(s.Expect.Backends, AddrPort{r}) {
			return fmt.Errorf("connection %d reaches %s: want one of %s", i, r, s.Expect.Backends)
		}
	}
	have := len(distinct(reached))
	if n := s.Expect.Distinct; n > 0 && have != n {
		return fmt.Errorf("%d backends are reached, want %d: %s", have, n, reached)
	}
	if n := s.Expect.DistinctMin; have < n {
		return fmt.Errorf("%d backends are reached, want at least %d: %s", have, n, reached)
	}
	return nil
}

func distinct(reached []netip.AddrPort) map[netip.AddrPort]bool {
	set := make(map[netip.AddrPort]bool)
	for _, r := range reached {
		set[r] = true
	}
	return set
}
