// This file reads from the rules of the nodes' kernels where each Service leads, and compares that
// with what the API says.
package e2e

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/testenv"
)

// leads maps frontends to their sorted backends, each as "address:port", or to rejected.
type leads map[frontend]string

const rejected = "rejected"

// frontend is an address, protocol and port to which clients of a Service connect.
type frontend struct {
	// Address is a cluster IP, or the unspecified address of the family for a node port.
	Address netip.Addr
	// Protocol is the protocol in lower case.
	Protocol string
	Port     uint16
}

// String returns a form such as "10.96.0.1:80/tcp".
func (f frontend) String() string {
	return fmt.Sprintf("%s/%s", netip.AddrPortFrom(f.Address, f.Port), f.Protocol)
}

func newLead(backends []string) string {
	if len(backends) == 0 {
		return rejected
	}
	slices.Sort(backends)
	return strings.Join(slices.Compact(backends), " ")
}

// frontends returns the frontends of a port of a Service: its cluster IPs and node ports in both
// families.
func (s *service) frontends(port corev1.ServicePort) []frontend {
	var list []frontend
	protocol := strings.ToLower(string(port.Protocol))
	for _, ip := range s.Spec.ClusterIPs {
		address, err := netip.ParseAddr(ip)
		if err != nil {
			continue // the address is "None"
		}
		list = append(list, frontend{address, protocol, uint16(port.Port)})
		if port.NodePort != 0 {
			unspecified := netip.IPv4Unspecified()
			if address.Is6() {
				unspecified = netip.IPv6Unspecified()
			}
			list = append(list, frontend{unspecified, protocol, uint16(port.NodePort)})
		}
	}
	return list
}

// truth returns where all Services of the API must lead: to the ready endpoints of the slices that
// belong to the Service, at the slice port with the name and protocol of the Service port.
func (c *cluster) truth(ctx context.Context) (leads, error) {
	services, endpointSlices, err := c.list(ctx)
	if err != nil {
		return nil, err
	}
	truth := leads{}
	for i := range services {
		s := &service{&services[i]}
		for _, port := range s.Spec.Ports {
			for _, f := range s.frontends(port) {
				truth[f] = newLead(backendsOf(s, port, f, endpointSlices))
			}
		}
	}
	return truth, nil
}

// list returns the Services and slices of all namespaces, because agents serve all of them.
func (c *cluster) list(ctx context.Context) ([]corev1.Service, []discoveryv1.EndpointSlice, error) {
	services, err := c.api.CoreV1().Services("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, nil, err
	}
	endpointSlices, err := c.api.DiscoveryV1().EndpointSlices("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, nil, err
	}
	return services.Items, endpointSlices.Items, nil
}

// backendsOf returns the backends of a frontend of a Service port.
func backendsOf(s *service, port corev1.ServicePort, f frontend, list []discoveryv1.EndpointSlice) []string {
	family := discoveryv1.AddressTypeIPv4
	if f.Address.Is6() {
		family = discoveryv1.AddressTypeIPv6
	}
	var backends []string
	for i := range list {
		slice := &list[i]
		if slice.Namespace != s.Namespace || slice.Labels[discoveryv1.LabelServiceName] != s.Name || slice.AddressType != family {
			continue
		}
		for _, p := range slice.Ports {
			if *p.Name != port.Name || *p.Protocol != port.Protocol {
				continue
			}
			for _, e := range slice.Endpoints {
				if e.Conditions.Ready == nil || *e.Conditions.Ready {
					backends = append(backends, netip.AddrPortFrom(netip.MustParseAddr(e.Addresses[0]), uint16(*p.Port)).String())
				}
			}
		}
	}
	return backends
}

// saved returns the chains and rules of both families, without the kernel's built-in chains. The
// rules of each chain are together and in order.
func (n *node) saved(ctx context.Context, variant string) ([]string, error) {
	var lines []string
	for _, family := range []string{"iptables", "ip6tables"} {
		out, err := n.Run(ctx, family+"-"+variant+"-save")
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(out) {
			switch fields := strings.Fields(line); {
			case fields[0] == "-A":
				lines = append(lines, family+" "+strings.Join(fields, " "))
			case fields[0][0] == ':' && fields[1] == "-": // built-in chains have a policy here
				lines = append(lines, family+" "+fields[0])
			}
		}
	}
	slices.SortStableFunc(lines, func(a, b string) int { return strings.Compare(chainOf(a), chainOf(b)) })
	return lines, nil
}

// chainOf returns the family and the chain of a saved line.
func chainOf(line string) string {
	fields := strings.Fields(line)
	if fields[1] == "-A" {
		return fields[0] + " " + fields[2]
	}
	return fields[0] + " " + strings.TrimPrefix(fields[1], ":")
}

// Saved returns the node's chains and rules.
func (n *node) Saved(t *testing.T) []string {
	t.Helper()
	lines, err := n.saved(t.Context(), n.variant)
	require.NoError(t, err)
	return lines
}

// refusals are the targets of rules for frontends without backends.
var refusals = []string{"REJECT", "DROP"}

// ownChain reports whether a chain belongs to one Service port: its backends, its routes or its
// sources.
func ownChain(name string) bool {
	return slices.ContainsFunc([]string{"P-", "L-", "R-", "S-"}, func(s string) bool { return strings.HasPrefix(name, "SLICECAST-"+s) })
}

// leads determines from the node's rules where frontends lead. It looks at rules that match a port
// number and then translate the address, jump to a chain of the Service port, or refuse the
// connection.
func (n *node) leads(ctx context.Context) (leads, error) {
	lines, err := n.saved(ctx, n.variant)
	if err != nil {
		return nil, err
	}
	chains := map[string][]map[string]string{}
	for _, line := range lines {
		if rule := parseRule(line); rule != nil {
			chains[chainOf(line)] = append(chains[chainOf(line)], rule)
		}
	}
	found := map[frontend][]string{}
	for chain, rules := range chains {
		family, _, _ := strings.Cut(chain, " ")
		for _, rule := range rules {
			target, to := rule["-j"], rule["--to-destination"]
			if rule["--dport"] == "" || to == "" && !slices.Contains(refusals, target) && !ownChain(target) {
				continue
			}
			f, err := frontendOf(family, rule)
			if err != nil {
				return nil, fmt.Errorf("%s: rule %v: %w", n.Name, rule, err)
			}
			before, again := found[f]
			if again && (to == "" || len(before) == 0) {
				return nil, fmt.Errorf("%s: more than one rule for %s", n.Name, f)
			}
			switch {
			case to != "":
				found[f] = append(before, to)
			default:
				found[f] = collect(chains, family, target)
			}
		}
	}
	out := leads{}
	for f, backends := range found {
		out[f] = newLead(backends)
	}
	return out, nil
}

// collect returns the destinations in a chain and in the chains that it leads to.
func collect(chains map[string][]map[string]string, family, chain string) []string {
	var backends []string
	for _, rule := range chains[family+" "+chain] {
		if to := rule["--to-destination"]; to != "" {
			backends = append(backends, to)
		} else if next := rule["-j"] + rule["-g"]; strings.HasPrefix(next, "SLICECAST-") {
			backends = append(backends, collect(chains, family, next)...)
		}
	}
	return backends
}

// parseRule returns the options of a saved rule with their arguments, or nil for the declaration of
// a chain.
func parseRule(line string) map[string]string {
	fields := strings.Fields(line)
	if fields[1] != "-A" {
		return nil
	}
	rule := map[string]string{}
	for i, field := range fields[:len(fields)-1] {
		if strings.HasPrefix(field, "-") {
			rule[field] = fields[i+1]
		}
	}
	return rule
}

func frontendOf(family string, rule map[string]string) (frontend, error) {
	f := frontend{Address: netip.IPv4Unspecified(), Protocol: rule["-p"]}
	if family == "ip6tables" {
		f.Address = netip.IPv6Unspecified()
	}
	if d := rule["-d"]; d != "" {
		prefix, err := netip.ParsePrefix(d)
		if err != nil {
			return f, err
		}
		f.Address = prefix.Addr()
	}
	_, err := fmt.Sscan(rule["--dport"], &f.Port)
	return f, err
}

// differences returns an error that describes the frontends for which want and have differ, or nil
// if there are none.
func differences(wantName string, want leads, haveName string, have leads) error {
	all := maps.Clone(want)
	maps.Copy(all, have)
	var texts []string
	for f := range all {
		if want[f] != have[f] {
			texts = append(texts, fmt.Sprintf("%s leads to %q in %s, to %q in %s", f, want[f], wantName, have[f], haveName))
		}
	}
	if len(texts) == 0 {
		return nil
	}
	slices.Sort(texts)
	return fmt.Errorf("%d differences, such as %s", len(texts), texts[0])
}

// AwaitTruth waits until on every node exactly the Services of the API lead where the API says.
func (c *cluster) AwaitTruth() {
	c.t.Helper()
	testenv.Eventually(c.t, settleTimeout, func() error {
		ctx := c.t.Context()
		if c.export != nil {
			if err := c.export.Write(ctx); err != nil {
				return err
			}
		}
		truth, err := c.truth(ctx)
		if err != nil {
			return err
		}
		for _, n := range c.nodes() {
			have, err := n.leads(ctx)
			if err != nil {
				return err
			}
			if err := differences("the API", truth, "the rules of node "+n.Name, have); err != nil {
				return err
			}
		}
		return nil
	})
}
