// Package printer is a programmer that touches no kernel. It writes what it is asked to program. It
// serves to watch an agent on a machine without a kernel to program, and to show in a demo what an
// update changes.
package printer

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// Programmer writes each Replace, Apply and Cleanup in a single write. The same state or changes
// always produce the same lines. The only errors are those of the writer.
type Programmer struct {
	out io.Writer
}

var _ programmer.Programmer = (*Programmer)(nil)

// New returns a Programmer that writes to out.
func New(out io.Writer) *Programmer { return &Programmer{out: out} }

// Families returns both IP families.
func (p *Programmer) Families() []model.Family { return []model.Family{model.IPv4, model.IPv6} }

// Replace writes a summary and every Service port, sorted by name.
func (p *Programmer) Replace(_ context.Context, state view.State) error {
	backends := 0
	for _, port := range state.Ports {
		backends += port.Cluster.Len() + port.Local.Len()
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "replace: %d service ports, %d backends; pods are %s; node ports are on %s",
		len(state.Ports), backends,
		pods(state.Node.Pods), nodePorts(state.Node))
	if len(state.Node.ServiceCIDRs) > 0 {
		fmt.Fprintf(&b, "; cluster IPs are in %s", join(state.Node.ServiceCIDRs))
	}
	b.WriteByte('\n')
	for _, id := range slices.SortedFunc(maps.Keys(state.Ports), compareIDs) {
		writePort(&b, "", state.Ports[id])
	}
	return p.write(&b)
}

// Apply writes what differs in each Service port. A plus marks what comes, a minus what goes.
func (p *Programmer) Apply(_ context.Context, changes []view.Change) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, "apply: %d service ports\n", len(changes))
	compare := func(a, b view.Change) int { return compareIDs(a.ID(), b.ID()) }
	for _, c := range slices.SortedFunc(slices.Values(changes), compare) {
		switch {
		case c.Before == nil:
			writePort(&b, "+ ", c.After)
		case c.After == nil:
			fmt.Fprintf(&b, "- %v\n", c.ID())
		default:
			fmt.Fprintf(&b, "  %v:\n", c.ID())
			writeDifference(&b, lines(c.Before), lines(c.After))
		}
	}
	return p.write(&b)
}

// Cleanup writes that nothing was programmed.
func (p *Programmer) Cleanup(context.Context) error {
	return p.write(bytes.NewBufferString("cleanup: nothing was programmed\n"))
}

func (p *Programmer) write(b *bytes.Buffer) error {
	if _, err := p.out.Write(b.Bytes()); err != nil {
		return fmt.Errorf("write what would be programmed: %w", err)
	}
	return nil
}

func compareIDs(a, b view.ServicePortID) int { return strings.Compare(a.String(), b.String()) }

// pods describes how connections of pods are recognized.
func pods(d view.PodDetector) string {
	switch {
	case d.Interface != "":
		return "behind " + d.Interface
	case d.InterfacePrefix != "":
		return "behind " + d.InterfacePrefix + "*"
	case len(d.Prefixes) > 0:
		return join(d.Prefixes)
	}
	return "not recognized"
}

func nodePorts(n view.Node) string {
	switch {
	case len(n.NodePorts) == 0:
		return "no address"
	case n.LocalhostNodePorts:
		return join(n.NodePorts) + " and localhost"
	}
	return join(n.NodePorts)
}

func join(prefixes []netip.Prefix) string {
	texts := make([]string, len(prefixes))
	for i, p := range prefixes {
		texts[i] = p.String()
	}
	return strings.Join(texts, ", ")
}

func writePort(b *bytes.Buffer, sign string, port *view.ServicePort) {
	fmt.Fprintf(b, "%s%v:\n", sign, port.ID)
	for _, line := range lines(port) {
		fmt.Fprintf(b, "    %s\n", line)
	}
}

// writeDifference writes the lines that only before has, then the lines that only after has.
func writeDifference(b *bytes.Buffer, before, after []string) {
	write := func(sign string, lines, others []string) {
		known := map[string]bool{}
		for _, line := range others {
			known[line] = true
		}
		for _, line := range lines {
			if !known[line] {
				fmt.Fprintf(b, "  %s %s\n", sign, line)
			}
		}
	}
	write("-", before, after)
	write("+", after, before)
}

// lines describes a Service port: one line for each frontend, then the affinity and the health
// check port, then one line for each backend.
func lines(port *view.ServicePort) []string {
	var out []string
	for i := range port.Frontends {
		out = append(out, frontend(&port.Frontends[i]))
	}
	if port.Affinity > 0 {
		out = append(out, fmt.Sprintf("affinity of clients for %v", port.Affinity))
	}
	if port.HealthCheckPort > 0 {
		out = append(out, fmt.Sprintf("health checks at port %d", port.HealthCheckPort))
	}
	known := map[netip.AddrPort]bool{}
	for _, to := range []view.Target{view.Cluster, view.Local} {
		for b := range port.Backends(to).All() {
			known[b.Address] = true
			line := fmt.Sprintf("%v → %v", to, b.Address)
			if b.Local {
				line += " on this node"
			}
			out = append(out, line)
		}
	}
	for b := range port.Serving.All() {
		if !known[b.Address] {
			out = append(out, fmt.Sprintf("flows to %v stay", b.Address))
		}
	}
	return out
}

func frontend(f *view.Frontend) string {
	where := fmt.Sprint(f.Port)
	if f.Address.IsValid() {
		where = fmt.Sprintf("%v port %d", f.Address, f.Port)
	}
	line := fmt.Sprintf("%v %s", f.Kind, where)
	switch {
	case f.Pods == f.Node && f.Node == f.Others:
		line += " → " + route(f.Others)
	case f.Node == f.Others:
		line += fmt.Sprintf(": pods → %s, others → %s", route(f.Pods), route(f.Others))
	case f.Pods == f.Others:
		line += fmt.Sprintf(": this node → %s, others → %s", route(f.Node), route(f.Others))
	default:
		line += fmt.Sprintf(": pods → %s, this node → %s, others → %s", route(f.Pods), route(f.Node), route(f.Others))
	}
	if len(f.Sources) > 0 {
		line += "; only from " + join(f.Sources)
	}
	return line
}

func route(r view.Route) string {
	if r.Masquerade {
		return r.To.String() + " masqueraded"
	}
	return r.To.String()
}
