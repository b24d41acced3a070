package explain

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// maxLeadsTo bounds the addresses whose flows are counted one by one.
const maxLeadsTo = 10000

// Flows are the flows that conntrack has of a Service port.
type Flows struct {
	// Total counts the flows to the frontends, and Stale those of them that lead to what is no
	// backend (any more). Connections by TCP and SCTP to endpoints that are gone are not stale: as
	// with kube-proxy, they go on until they end. Direct counts the flows to backends that did not
	// come by a frontend.
	Total  int `json:"total"`
	Stale  int `json:"stale"`
	Direct int `json:"direct"`
	// LeadsTo counts the flows by where they lead, most first. Their number is bounded.
	LeadsTo []FlowTarget `json:"leadsTo"`
	// Sample is a bounded number of flows, stale ones first.
	Sample []Flow `json:"sample"`
	// Error is why flows were not read, or why some may be missing.
	Error string `json:"error,omitempty"`
}

// FlowTarget is where flows lead.
type FlowTarget struct {
	Address string `json:"address"`
	Count   int    `json:"count"`
	// Stale says why this is no backend; empty if it is one.
	Stale string `json:"stale,omitempty"`
}

// Flow is a connection.
type Flow struct {
	Source      string `json:"source"`
	Destination string `json:"destination"`
	LeadsTo     string `json:"leadsTo"`
	Stale       string `json:"stale,omitempty"`
}

// These say of flows that they do not lead to a backend.
const (
	noBackend    = "it is no endpoint that serves"
	goesOn       = "it is no endpoint that serves, and this connection goes on until it ends"
	untranslated = "it is not translated: it began while the kernel had no backend for it"
)

// flowCount gathers the flows of a Service port.
type flowCount struct {
	out      *Flows
	port     view.PortExplanation
	endpoint map[netip.AddrPort]bool // whether the endpoint serves or receives connections
	to       map[netip.AddrPort]*FlowTarget
	healthy  []Flow
}

// flows reads conntrack's flows of ports, which are the last ones of the answer, in one pass for
// each protocol.
func (e *explainer) flows(family model.Family, ports []view.PortExplanation) {
	counts := make([]*flowCount, len(ports))
	offset := len(e.Ports) - len(ports)
	protocols := map[byte]bool{}
	for i, p := range ports {
		c := &flowCount{out: &e.Ports[offset+i].Flows, port: p, endpoint: map[netip.AddrPort]bool{}, to: map[netip.AddrPort]*FlowTarget{}}
		c.out.LeadsTo, c.out.Sample = []FlowTarget{}, []Flow{}
		for _, x := range p.Endpoints {
			c.endpoint[x.Address] = x.Conditions.Serving || x.Conditions.Ready
		}
		counts[i] = c
		protocols[number(p.ID.Protocol)] = true
	}
	for protocol := range protocols {
		err := e.read(family, protocol, counts)
		for _, c := range counts {
			if err != nil && number(c.port.ID.Protocol) == protocol {
				c.out.Error = err.Error()
			}
		}
	}
	for _, c := range counts {
		c.finish()
		if c.out.Error != "" {
			e.Unjudged = append(e.Unjudged, fmt.Sprintf("the flows of %v: %s", c.port.ID, c.out.Error))
		}
	}
}

// read reads the flows of a protocol.
func (e *explainer) read(family model.Family, protocol byte, counts []*flowCount) error {
	s, err := netlink.Open(unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("open conntrack: %w", err)
	}
	defer s.Close()
	open := slices.DeleteFunc(slices.Clone(e.options.Addresses), func(a netip.Addr) bool { return !contains(e.options.State.Node.NodePorts, a) })
	err = s.Flows(family, protocol, func(f netlink.Flow) {
		if f.Original.Protocol != protocol || e.question.From.IsValid() && f.Original.Source.Addr() != e.question.From {
			return
		}
		for _, c := range counts {
			if number(c.port.ID.Protocol) == protocol && c.add(f, open) {
				return
			}
		}
	})
	if errors.Is(err, netlink.ErrInterrupted) {
		return errors.New("the table changed while it was read, so flows may be missing: run the command again")
	}
	return err
}

func number(p model.Protocol) byte {
	switch p {
	case model.UDP:
		return unix.IPPROTO_UDP
	case model.SCTP:
		return unix.IPPROTO_SCTP
	}
	return unix.IPPROTO_TCP
}

// add counts a flow. It returns false if the flow is not one of the port's frontends.
func (c *flowCount) add(f netlink.Flow, addresses []netip.Addr) bool {
	to := f.Original.Destination
	if !slices.ContainsFunc(c.port.ServicePort.Frontends, func(x view.Frontend) bool {
		if x.Kind != view.NodePort {
			return to == netip.AddrPortFrom(x.Address, x.Port)
		}
		return to.Port() == x.Port && slices.Contains(addresses, to.Addr())
	}) {
		if c.endpoint[to] {
			c.out.Direct++
		}
		return false
	}
	c.out.Total++
	leads, stale := f.Reply.Source, ""
	switch {
	case leads == to:
		stale = untranslated
	case !c.endpoint[leads] && c.port.ID.Protocol != model.UDP: // as agent/conntrack leaves them
		stale = goesOn
	case !c.endpoint[leads]:
		stale = noBackend
	}
	flow := Flow{f.Original.Source.String(), to.String(), leads.String(), stale}
	switch {
	case stale != "":
		if stale != goesOn {
			c.out.Stale++
		}
		if len(c.out.Sample) < maxFlows {
			c.out.Sample = append(c.out.Sample, flow)
		}
	case len(c.healthy) < maxFlows:
		c.healthy = append(c.healthy, flow)
	}
	target := c.to[leads]
	if target == nil && len(c.to) < maxLeadsTo {
		target = &FlowTarget{Address: leads.String(), Stale: stale}
		c.to[leads] = target
	}
	if target != nil {
		target.Count++
	}
	return true
}

// finish completes the output.
func (c *flowCount) finish() {
	c.out.Sample = append(c.out.Sample, c.healthy[:min(len(c.healthy), maxFlows-len(c.out.Sample))]...)
	for target := range maps.Values(c.to) {
		c.out.LeadsTo = append(c.out.LeadsTo, *target)
	}
	slices.SortFunc(c.out.LeadsTo, func(a, b FlowTarget) int {
		return cmp.Or(cmp.Compare(b.Stale, a.Stale), cmp.Compare(b.Count, a.Count), cmp.Compare(a.Address, b.Address))
	})
	c.out.LeadsTo = c.out.LeadsTo[:min(len(c.out.LeadsTo), maxEndpoints)]
}
