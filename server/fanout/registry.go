package fanout

import (
	"slices"
	"sync"
)

// maxOthers bounds the open sessions of one user that are not agents': those of observers,
// operators and relays. A node has one agent.
const maxOthers = 256

// registry holds the open sessions. Its invariants, under mu:
//
//  1. all holds every session s at index s.index. If listed is set, list has handed out the slice,
//     so it must be copied before a change.
//  2. byNode holds the same sessions by node name, which is empty for clients without a node.
//  3. agents holds each node's latest agent. An older session of the node is about to end.
//  4. others counts the sessions of each user that are not agents'; it is at most maxOthers.
type registry struct {
	mu     sync.Mutex
	all    []*Session
	listed bool
	byNode map[string]map[*Session]struct{}
	agents map[string]*Session
	others map[string]int
}

func newRegistry() *registry {
	return &registry{
		byNode: make(map[string]map[*Session]struct{}), agents: make(map[string]*Session), others: make(map[string]int),
	}
}

// add adds a session. It returns the older session of the same node's agent, if there is one. ok is
// false if the session's user has as many sessions as it may; the session is not added then.
func (r *registry) add(s *Session) (older *Session, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !s.isAgent() && r.others[s.user] == maxOthers {
		return nil, false
	}
	r.copyListedLocked()
	s.index = len(r.all)
	r.all = append(r.all, s)
	if r.byNode[s.node] == nil {
		r.byNode[s.node] = make(map[*Session]struct{})
	}
	r.byNode[s.node][s] = struct{}{}
	if !s.isAgent() {
		r.others[s.user]++
		return nil, true
	}
	older = r.agents[s.node]
	r.agents[s.node] = s
	return older, true
}

func (r *registry) remove(s *Session) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.copyListedLocked()
	last := len(r.all) - 1
	r.all[s.index] = r.all[last]
	r.all[s.index].index = s.index
	r.all[last] = nil
	r.all = r.all[:last]
	delete(r.byNode[s.node], s)
	if len(r.byNode[s.node]) == 0 {
		delete(r.byNode, s.node)
	}
	if !s.isAgent() {
		if r.others[s.user]--; r.others[s.user] == 0 {
			delete(r.others, s.user)
		}
	} else if r.agents[s.node] == s {
		delete(r.agents, s.node)
	}
}

// copyListedLocked makes all safe to change; see invariant 1.
func (r *registry) copyListedLocked() {
	if r.listed {
		r.all, r.listed = slices.Clone(r.all), false
	}
}

// list returns all sessions. The caller must not change the slice.
func (r *registry) list() []*Session {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.listed = true
	return r.all
}

func (r *registry) relays() []*Session {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.relaysLocked()
}

func (r *registry) relaysLocked() (relays []*Session) {
	for s := range r.byNode[""] {
		if s.isRelay() {
			relays = append(relays, s)
		}
	}
	return relays
}

// followers returns the sessions that follow a Node: those of the node, and all relays'.
func (r *registry) followers(node string) []*Session {
	r.mu.Lock()
	defer r.mu.Unlock()
	followers := r.relaysLocked()
	for s := range r.byNode[node] {
		followers = append(followers, s)
	}
	return followers
}
