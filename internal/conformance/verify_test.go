// This file compares the rules of a subject with the objects of a case, as "slicecast-agent verify"
// does. What the packets of a case prove to be right must not be a difference, with Slicecast's
// rules and with kube-proxy's.
package conformance

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/agent/verify"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/source/file"
)

// deviations are the cases in which kube-proxy differs from the view on purpose, with what all
// differences are about. It opens NodePorts on all addresses of a family without an InternalIP, and
// load balancers to everybody if it does not understand their source ranges.
var deviations = map[string][]string{
	"nodeport-primary-one-family": {"should be left alone, because the address has no NodePorts"},
	"lb-source-ranges-mapped":     {"what comes to loadBalancer 198.51.100.4:80", "(-s 203.0.113.0/32 -m comment --comment ns1/lb-mapped:p80 loadbalancer IP -j KUBE-EXT-"},
}

// diversions are the cases in which another program leads a Service's packets elsewhere, with where
// they go. verify must say so, with Slicecast's rules of Services and with kube-proxy's.
var diversions = map[string]string{"beside-other-rules": "but leads to 10.180.1.93:8080"}

// verify returns an error if the rules on the node differ from what the objects say after a step.
func (s *stage) verify(ctx context.Context, c *Case, step *Step) error {
	state, err := s.wanted(ctx)
	if err != nil {
		return err
	}
	return s.node.Do(func() error { return s.judge(ctx, c, step, state) })
}

// wanted returns what the node should do for the objects in the API server.
func (s *stage) wanted(ctx context.Context) (view.State, error) {
	objects := &verify.Objects{}
	var all []io.Reader
	for _, path := range []string{
		"/api/v1/services", "/apis/discovery.k8s.io/v1/endpointslices", "/apis/networking.k8s.io/v1/servicecidrs", "/api/v1/nodes",
	} {
		list, err := s.cluster.rest.Get().AbsPath(path).Do(ctx).Raw()
		if err != nil {
			return view.State{}, err
		}
		all = append(all, strings.NewReader(string(list)))
	}
	log := slog.New(slog.DiscardHandler)
	if err := file.Read(io.MultiReader(all...), "objects", file.Options{Log: log}, objects); err != nil {
		return view.State{}, err
	}
	return objects.State(s.viewOptions())
}

// judge compares the kernel with what the node should do.
func (s *stage) judge(ctx context.Context, c *Case, step *Step, state view.State) error {
	r, err := verify.Settled(ctx, verify.Options{State: state}, settleTimeout())
	if err != nil {
		return err
	}
	var lines []string
	diverted := false
	for _, d := range r.Differences {
		elsewhere := diversions[c.ID]
		isAbout := func(text string) bool { return strings.Contains(d.String(), text) }
		switch {
		case s.subject.Reference() && slices.ContainsFunc(deviations[c.ID], isAbout):
		case step.NFT != "" && elsewhere != "" && strings.Contains(d.String(), elsewhere):
			diverted = true
		default:
			lines = append(lines, d.String())
		}
	}
	if step.NFT != "" && !diverted {
		lines = append(lines, "verify does not notice the other program's rules")
	}
	if lines = append(lines, r.Unjudged...); len(lines) > 0 {
		return fmt.Errorf("%d differences:\n%s", len(lines), strings.Join(lines, "\n"))
	}
	return nil
}

// viewOptions returns the settings with which the subject runs.
func (s *stage) viewOptions() view.Options {
	o := view.Options{NodeName: s.running.Node, MasqueradeAll: s.running.MasqueradeAll, RefuseExternalIPs: s.running.NoExternalIPs}
	switch s.running.detectLocalMode() {
	case ClusterCIDR:
		for _, c := range s.running.clusterCIDRs() {
			o.ClusterCIDRs = append(o.ClusterCIDRs, netip.MustParsePrefix(c))
		}
	case NodeCIDR:
		o.DetectLocal = view.ByNodeCIDR
	case InterfaceNamePrefix:
		o.DetectLocal, o.InterfaceNamePrefix = view.ByInterfaceNamePrefix, s.running.PodInterfacePrefix
	}
	for _, a := range s.running.NodePortAddresses {
		if a == "primary" {
			o.NodePortPrimary = true
		} else {
			o.NodePortAddresses = append(o.NodePortAddresses, netip.MustParsePrefix(a))
		}
	}
	o.LocalhostNodePorts = s.running.LocalhostNodePorts
	switch {
	case !s.subject.Reference():
	case s.subject.Mode() == IPTables && o.LocalhostNodePorts == nil:
		o.LocalhostNodePorts = new(true) // kube-proxy's default
	case s.subject.Mode() == IPVS:
		o.LocalhostNodePorts = new(false) // all addresses by default, and never those of loopback
	}
	return o
}

// servesObjects reports whether a step leaves an agent that follows the objects.
func (s *stage) servesObjects(step *Step) bool {
	return !slices.Contains(step.Delete, node(s.running.Node))
}
