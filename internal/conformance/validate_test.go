// This file checks that a case makes sense before it is played.
package conformance

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

// validate returns the errors that the types allow but the format does not.
func (c *Case) validate() error {
	v := &validator{ids: map[string]bool{}}
	v.check(c.Name != "", "name is missing")
	v.modes("modes", c.Modes)
	v.config("config", &c.Config)
	for version, modes := range c.KubeProxyStops {
		v.modes("kubeProxyStops."+version, modes)
	}
	v.check(c.Node.Name != "", "node.name is missing")
	v.check(len(c.Objects) > 0, "objects is empty")
	v.changes("", nil, c.Status)
	v.checks("", &c.Checks)
	for i := range c.Steps {
		v.step(fmt.Sprintf("steps[%d]", i), &c.Steps[i])
	}
	return errors.Join(v.errs...)
}

// validator collects errors with the paths of their fields.
type validator struct {
	errs []error
	// ids holds the IDs of conntrack entries so far.
	ids map[string]bool
}

func (v *validator) check(ok bool, format string, args ...any) {
	if !ok {
		v.errs = append(v.errs, fmt.Errorf(format, args...))
	}
}

func oneOf[T ~string](v *validator, path string, value T, allowed ...T) {
	v.check(slices.Contains(allowed, value), "%s is %q: want one of %q", path, value, allowed)
}

func (v *validator) modes(path string, modes []Mode) {
	for _, mode := range modes {
		oneOf(v, path, mode, IPTables, NFTables, IPVS)
	}
}

func (v *validator) config(path string, c *Config) {
	if mode := c.DetectLocalMode; mode != nil {
		oneOf(v, path+".detectLocalMode", *mode, ClusterCIDR, NodeCIDR, InterfaceNamePrefix, NoDetection)
	}
	v.check((c.detectLocalMode() == InterfaceNamePrefix) == (c.PodInterfacePrefix != ""),
		"%s: podInterfacePrefix is for detectLocalMode InterfaceNamePrefix, which needs it", path)
}

func (v *validator) step(path string, s *Step) {
	v.check(s.Name != "", "%s.name is missing", path)
	v.modes(path+".modes", s.Modes)
	oneOf(v, path+".action", s.Action, "", RestartAgent, StopAgentApplyStart, FlushKubeRules)
	if s.Config != nil {
		v.config(path+".config", s.Config)
		v.check(s.Action == RestartAgent || s.Action == StopAgentApplyStart, "%s.config: the agent is not started again", path)
	}
	v.check(s.WithinSeconds >= 0, "%s.withinSeconds is negative", path)
	for i, entry := range s.InjectConntrack {
		at := fmt.Sprintf("%s.injectConntrack[%d]", path, i)
		oneOf(v, at+".proto", entry.Proto, TCP, UDP, SCTP)
		v.check(entry.ID != "" && !v.ids[entry.ID], "%s.id is %q: want a unique ID", at, entry.ID)
		for _, tuple := range []Tuple{entry.Orig, entry.Reply} {
			v.check(tuple.Src.IsValid() && tuple.Dst.IsValid(), "%s: src or dst is missing", at)
		}
		v.ids[entry.ID] = true
	}
	for _, id := range slices.Concat(s.ExpectConntrack.Deleted, s.ExpectConntrack.Kept, s.ExpectConntrack.KeptBySlicecast) {
		v.check(v.ids[id], "%s.expectConntrack: no entry has the ID %q", path, id)
	}
	for i, r := range s.Delete {
		err := r.validate()
		v.check(err == nil, "%s.delete[%d]: %w", path, i, err)
	}
	v.changes(path, s.Patch, s.Status)
	v.checks(path, &s.Checks)
}

func (v *validator) changes(path string, patches []Patch, statuses []Status) {
	for i, p := range patches {
		err := p.validate()
		v.check(err == nil, "%s.patch[%d]: %w", path, i, err)
		oneOf(v, fmt.Sprintf("%s.patch[%d].type", path, i), p.Type, "merge")
	}
	for i, s := range statuses {
		err := s.validate()
		v.check(err == nil, "%s.status[%d]: %w", path, i, err)
	}
}

func (v *validator) checks(path string, c *Checks) {
	for i := range c.Flows {
		f := &c.Flows[i]
		at := fmt.Sprintf("%s.flows[%d] (%s)", path, i, f.Name)
		v.connections(at, &f.Connections)
		v.check(!f.GoesOn || f.Sport != 0, "%s.goesOn: sport is missing", at)
		v.expectation(at+".expect", &f.Expect)
		for name, e := range map[string]*Expectation{
			".expectNftables": f.ExpectNFTables, ".expectIpvs": f.ExpectIPVS, ".expectSlicecast": f.ExpectSlicecast,
		} {
			if e != nil {
				v.expectation(at+name, e)
			}
		}
		for i := range f.Accept {
			v.expectation(fmt.Sprintf("%s.accept[%d]", at, i), &f.Accept[i])
		}
	}
	for i := range c.Sessions {
		s := &c.Sessions[i]
		at := fmt.Sprintf("%s.sessions[%d] (%s)", path, i, s.Name)
		v.connections(at, &s.Connections)
		v.check(s.Count > 0, "%s.connections is missing", at)
		v.check(s.Sport == 0, "%s.sport: a session has several connections, which need different ports", at)
		v.check(s.IntervalSeconds >= 0, "%s.intervalSeconds is negative", at)
		v.check((s.Expect.Distinct > 0) != (s.Expect.DistinctMin > 0), "%s.expect: want distinct or distinctMin", at)
		v.check(len(s.Expect.Backends) > 0, "%s.expect.backends is empty", at)
	}
	for i := range c.HealthChecks {
		at := fmt.Sprintf("%s.healthChecks[%d]", path, i)
		oneOf(v, at+".from", c.HealthChecks[i].From, PodLocal, External, FromNode)
		v.health(at, &c.HealthChecks[i])
	}
	for i := range c.ProxyHealth {
		at := fmt.Sprintf("%s.proxyHealth[%d]", path, i)
		v.check(c.ProxyHealth[i].From == "", "%s.from: the agent's own health checks are always requested from the node", at)
		v.health(at, &c.ProxyHealth[i])
	}
}

func (v *validator) connections(path string, c *Connections) {
	v.check(c.Name != "", "%s.name is missing", path)
	oneOf(v, path+".from", c.From, PodLocal, PodRemote, External, FromNode)
	oneOf(v, path+".proto", c.Proto, TCP, UDP, SCTP)
	v.check(c.Dst.IsValid(), "%s.dst is missing", path)
	v.check(c.Port != 0, "%s.port is missing", path)
	v.check(!c.Src.IsValid() || !c.SrcRange.First.IsValid(), "%s has both src and srcRange", path)
	for _, src := range []netip.Addr{c.Src.Addr, c.SrcRange.First} {
		v.check(!src.IsValid() || src.Is4() == c.Dst.Is4(), "%s: src and dst are of different families", path)
	}
}

func (v *validator) expectation(path string, e *Expectation) {
	if len(e.Backends) == 0 {
		oneOf(v, path+".verdict", e.Verdict, Reject, Drop, Accept)
		v.check(e.Masquerade == "", "%s: masquerade without backends", path)
		return
	}
	v.check(e.Verdict == "", "%s has both backends and a verdict", path)
	oneOf(v, path+".masquerade", e.Masquerade, Masqueraded, SourceKept, HairpinOnly, MasqueradedAny)
}

func (v *validator) health(path string, h *HealthCheck) {
	v.check(h.URL != "", "%s.url is missing", path)
	for name, e := range map[string]*ExpectHealth{".expect": &h.Expect, ".expectSlicecast": h.ExpectSlicecast} {
		v.check(e == nil || e.Refused != (e.Status != 0), "%s%s: want a status or refused", path, name)
	}
}
