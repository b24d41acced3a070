// This file lists what a real kube-proxy does in its mode ipvs although the cases say otherwise. It
// was seen of version 1.37.2 in the virtual machine. What the source of kube-proxy says of the mode
// is in the cases themselves, as expectIpvs.
package conformance

import (
	"net/netip"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// deviationIPVS is what kube-proxy does to some flows of a case in its mode ipvs.
type deviationIPVS struct {
	// id is the name of a case, step that of one of its steps, or empty for all of them, and flows
	// matches the names of flows.
	id, step string
	flows    *regexp.Regexp
	does     func(Expectation) Expectation
	// reason has the issue of kube-proxy, if there is one.
	reason string
}

var deviationsIPVS = []deviationIPVS{
	{
		"node-deleted", "", regexp.MustCompile(`^outside to the VIP has nowhere to go here$`), leadsTo("10.180.1.1:80"),
		"With a policy Local and no local backend, it leads everybody to the backends of other nodes, on purpose: kubernetes/kubernetes#97081.",
	},
	{
		"conntrack-gone-while-away", "the Service is deleted while the agent is away", regexp.MustCompile(`^client of the (external|load|NodePort)`), becomes(Accept),
		"IPVS ends connections to a virtual service that is gone, because kube-proxy sets the sysctl expire_nodest_conn.",
	},
	{
		"dualstack-clusterip", "", regexp.MustCompile(`^v6 .*is masqueraded$`), masqueradedAnyhow,
		"For IPv6, the kernel masquerades to any address of the node, and those of Services on kube-ipvs0 are among them.",
	},
	{
		"nodeport-default", "", regexp.MustCompile(`node.* v6$`), masqueradedAnyhow,
		"For IPv6, the kernel masquerades to any address of the node, and those of Services on kube-ipvs0 are among them.",
	},
	{
		"lb-source-ranges-mapped", "all that is mapped is all of IPv4", regexp.MustCompile(`^anybody$`), becomes(Drop),
		"Its ipset of the type hash:ip,port,net cannot have the range 0.0.0.0/0, so nobody is admitted.",
	},
}

// leadsTo expects a backend that sees the client's address.
func leadsTo(backend string) func(Expectation) Expectation {
	return func(Expectation) Expectation {
		return Expectation{Backends: []AddrPort{{netip.MustParseAddrPort(backend)}}, Masquerade: SourceKept}
	}
}

func becomes(v Verdict) func(Expectation) Expectation {
	return func(Expectation) Expectation { return Expectation{Verdict: v} }
}

// masqueradedAnyhow expects the same backends, whatever source they see.
func masqueradedAnyhow(e Expectation) Expectation {
	e.Masquerade = MasqueradedAny
	return e
}

// deviates returns what kube-proxy does to a flow in its mode ipvs, if that is listed.
func (d *deviationIPVS) deviates(c *Case, step *Step, f *Flow) (does Expectation, ok bool) {
	if d.id != c.ID || d.step != "" && d.step != step.Name || !d.flows.MatchString(f.Name) {
		return Expectation{}, false
	}
	return d.does(f.expected(IPVS)), true
}

// ofKubeProxyIPVS returns what kube-proxy does to a flow in its mode ipvs, if that is listed.
func ofKubeProxyIPVS(c *Case, step *Step, f *Flow) (does Expectation, ok bool) {
	for i := range deviationsIPVS {
		if does, ok = deviationsIPVS[i].deviates(c, step, f); ok {
			return does, true
		}
	}
	return Expectation{}, false
}

// TestDeviationsIPVS requires that each deviation is about a flow, and not what the case says.
func TestDeviationsIPVS(t *testing.T) {
	t.Parallel()
	cases, _ := loadAll(t)
	for i := range deviationsIPVS {
		d, found := &deviationsIPVS[i], 0
		require.NotEmpty(t, d.reason)
		for _, c := range cases {
			for _, step := range c.All(IPVS) {
				for j := range step.Flows {
					f := &step.Flows[j]
					if does, ok := d.deviates(c, step, f); ok {
						found++
						require.NotEqual(t, f.expected(IPVS), does, "%s, step %q, flow %q", c.ID, step.Name, f.Name)
					}
				}
			}
		}
		require.NotZero(t, found, "%s, step %q, flows %v", d.id, d.step, d.flows)
	}
}
