// Package printer is a programmer that touches no kernel and writes what it is told: to watch an agent where there is
// none to program, and to see in a demo what an update changes.
package printer

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
)

// Programmer writes each Replace, Apply and Cleanup, in one write, as lines that depend on nothing else. Its errors are
// the writer's.
type Programmer struct {
	out io.Writer
}

var _ programmer.Programmer = (*Programmer)(nil)

// New makes a Programmer that writes to out.
func New(out io.Writer) *Programmer { return &Programmer{out: out} }

// Replace writes a summary and every Service port, in the order of their names.
func (p *Programmer) Replace(_ context.Context, state view.State) error {
	backends := 0
	for _, port := range state.Ports {
		backends += len(port.Backends)
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "replace: %d service ports, %d backends; pods are %s\n", len(state.Ports), backends, join(state.Node.LocalPods))
	for _, id := range slices.SortedFunc(maps.Keys(state.Ports), compareIDs) {
		writePort(&b, "", state.Ports[id])
	}
	return p.write(&b)
}

// Apply writes what differs in each Service port: + for what comes, - for what goes.
func (p *Programmer) Apply(_ context.Context, changes []view.Change) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, "apply: %d service ports\n", len(changes))
	for _, c := range slices.SortedFunc(slices.Values(changes), func(a, b view.Change) int { return compareIDs(a.ID(), b.ID()) }) {
		switch {
		case c.Before == nil:
			writePort(&b, "+ ", c.After)
		case c.After == nil:
			fmt.Fprintf(&b, "- %v\n", c.ID())
		default:
			fmt.Fprintf(&b, "  %v: %d → %d backends\n", c.ID(), len(c.Before.Backends), len(c.After.Backends))
			writeDifference(&b, frontends(c.Before), frontends(c.After))
			writeDifference(&b, backends(c.Before), backends(c.After))
		}
	}
	return p.write(&b)
}

// Cleanup writes that there is nothing to do.
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

func join[T fmt.Stringer](items []T) string {
	if len(items) == 0 {
		return "not told apart"
	}
	texts := make([]string, len(items))
	for i, item := range items {
		texts[i] = item.String()
	}
	return strings.Join(texts, ", ")
}

func writePort(b *bytes.Buffer, sign string, port *view.ServicePort) {
	fmt.Fprintf(b, "%s%v: %d backends\n", sign, port.ID, len(port.Backends))
	for _, line := range slices.Concat(frontends(port), backends(port)) {
		fmt.Fprintf(b, "    %s\n", line)
	}
}

// writeDifference writes the lines that go and the lines that come.
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

// frontends gives a line for each frontend.
func frontends(port *view.ServicePort) []string {
	lines := make([]string, len(port.Frontends))
	for i, f := range port.Frontends {
		where := fmt.Sprint(f.Port)
		if f.Address.IsValid() {
			where = fmt.Sprintf("%v port %d", f.Address, f.Port)
		}
		lines[i] = fmt.Sprintf("%v %s", f.Kind, where)
		switch f.Masquerade {
		case view.MasqueradeNonLocal:
			lines[i] += ", masquerade unless from a pod"
		case view.MasqueradeAlways:
			lines[i] += ", masquerade"
		}
	}
	return lines
}

// backends gives a line for each backend, or one that says that connections are rejected.
func backends(port *view.ServicePort) []string {
	if len(port.Backends) == 0 {
		return []string{"→ rejected, as there is no backend"}
	}
	lines := make([]string, len(port.Backends))
	for i, b := range port.Backends {
		lines[i] = fmt.Sprintf("→ %v", b.Address)
		if b.Local {
			lines[i] += " on this node"
		}
	}
	return lines
}
