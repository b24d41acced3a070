package iptables

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
)

const (
	// maxTries limits the attempts of one search for refused Service ports. A Replace or Apply
	// searches twice at most: among those that were refused before, and among others.
	maxTries = 200
	// maxWrites limits the attempts to write some of the Service ports that the kernel refuses
	// together, for each Replace or Apply. It suffices to find one among 10,000.
	maxWrites = 32
)

// errUntried is the reason of a Service port that could not be tried within these limits.
var errUntried = errors.New("not tried yet, because the kernel refuses the rules of many Service ports")

// writeOrReject is write without the Service ports that the kernel refuses, which are set back to
// their last state. It first tries the Service ports that the kernel refused before, because it
// most likely lacks something and refuses them again. So the others are searched only if more are
// refused.
func (f *kernelFamily) writeOrReject(ctx context.Context, all bool, ports servicePorts, last plans) error {
	again := servicePorts{}
	for id, port := range ports {
		if f.refused[id] {
			again[id] = port
			delete(f.refused, id)
		}
	}
	if all {
		clear(f.refused) // the rest are no longer wanted
	}
	bad, err := f.search(ctx, sorted(again))
	if err == nil && all && len(bad) > 0 && len(bad) == len(ports) {
		// If there are others, writing them shows whether the family works.
		err = f.checkOrdinary(ctx)
	}
	if err != nil {
		return err
	}
	f.setBack(bad, last)
	rest := maps.Clone(ports)
	for _, b := range bad {
		delete(rest, b.ID)
	}
	more, err := f.writeOrSearch(ctx, all, rest, again, last)
	if err != nil {
		return err
	}
	return joinPortErrors(append(bad, more...))
}

// setBack sets rejected Service ports back to their last state.
func (f *kernelFamily) setBack(rejected []*programmer.PortError, last plans) {
	for _, r := range rejected {
		f.setLast(r.ID, last)
	}
	f.remember(rejected)
}

// remember adds the Service ports that the kernel refused to those that it refused before.
func (f *kernelFamily) remember(rejected []*programmer.PortError) {
	for _, r := range rejected {
		if !errors.Is(r, errUntried) {
			f.refused[r.ID] = true
		}
	}
}

// setLast sets a Service port to its last state.
func (f *kernelFamily) setLast(id view.ServicePortID, last plans) {
	var port *view.ServicePort
	if p := last[id]; p != nil {
		port = p.ServicePort
	}
	f.set(id, port)
}

// writeOrSearch is write. If the kernel rejects the rules, it finds the Service ports at fault,
// sets them back, and writes the rest. Only Service ports that the kernel does not hold as wanted
// can be at fault. The others are in each input that is written meanwhile. again holds those that
// were refused before.
func (f *kernelFamily) writeOrSearch(
	ctx context.Context, all bool, ports, again servicePorts, last plans,
) (bad []*programmer.PortError, _ error) {
	err := f.write(ctx, all)
	if !errors.As(err, new(*rejectedError)) {
		return nil, err
	}
	// If the kernel refuses an ordinary Service port, too, these are not at fault. The error is the
	// same each time, whereas err names one of many rules.
	if err := f.checkOrdinary(ctx); err != nil {
		return nil, err
	}
	fresh, known, err := f.missing(ctx, ports, again)
	if err != nil {
		return nil, err
	}
	if bad, err = f.search(ctx, slices.Concat(known, fresh)); err != nil {
		return nil, err
	}
	f.setBack(bad, last)
	isBad := func(p *view.ServicePort) bool {
		return slices.ContainsFunc(bad, func(b *programmer.PortError) bool { return b.ID == p.ID })
	}
	more, err := f.grow(ctx, slices.DeleteFunc(known, isBad), slices.DeleteFunc(fresh, isBad), last)
	return append(bad, more...), err
}

// missing reads the kernel's rules, and returns the Service ports that they do not hold as wanted.
// known are those of which they hold something else, and fresh are the others and those that were
// refused before. An earlier run may have written the rules.
func (f *kernelFamily) missing(
	ctx context.Context, ports, again servicePorts,
) (known, fresh []*view.ServicePort, _ error) {
	f.held = nil
	s := saved{chains: newChainHashes(), texts: map[uint64]bool{}}
	if err := f.tool.read(ctx, f.allHooks(), &s); err != nil {
		return nil, nil, err
	}
	defer func() { s.texts = nil }()
	f.hold(&s)
	for _, port := range sorted(ports) {
		switch p := f.ports[port.ID]; {
		case f.holds(p):
		case again[port.ID] == nil && f.holdsSome(p):
			known = append(known, port)
		default:
			fresh = append(fresh, port)
		}
	}
	slices.SortStableFunc(fresh, func(a, b *view.ServicePort) int {
		switch was, is := again[a.ID] != nil, again[b.ID] != nil; {
		case was == is:
			return 0
		case was:
			return 1
		}
		return -1
	})
	return known, fresh, nil
}

// holds reports whether the kernel has all rules of a Service port.
func (f *kernelFamily) holds(p *plan) bool {
	for _, c := range f.chainsOf(p) {
		var rules bytes.Buffer
		c.write(&rules)
		if held, ok := f.held.chains[c.table][c.name]; !ok || held != hashOf(rules.Bytes()) {
			return false
		}
	}
	var rules [tables]bytes.Buffer
	f.treeRules(&rules, checkChain, p)
	for t := range rules {
		for rule := range bytes.Lines(rules[t].Bytes()) {
			if !f.held.texts[textHash(table(t), unchained(rule))] {
				return false
			}
		}
	}
	return true
}

// holdsSome reports whether the kernel has a rule of one of a Service port's frontends.
func (f *kernelFamily) holdsSome(p *plan) bool {
	for i := range p.Frontends {
		text := []byte(comment(frontend{p, i}))
		if f.held.texts[textHash(nat, text)] || f.held.texts[textHash(filter, text)] {
			return true
		}
	}
	return false
}

// grow is for a kernel that accepts each Service port by itself, but not all of them together, for
// example because memory is limited. It writes as many of these as the kernel accepts beside all
// others, known ones first, and returns those that it does not accept. What it has written it does
// not remove again. known and fresh are those that missing returned.
func (f *kernelFamily) grow(
	ctx context.Context, known, fresh []*view.ServicePort, last plans,
) (bad []*programmer.PortError, _ error) {
	written := true
	try := func(ports []*view.ServicePort) error {
		for _, p := range ports {
			f.set(p.ID, p)
		}
		err := f.write(ctx, true)
		if written = err == nil; written || !errors.As(err, new(*rejectedError)) {
			return err
		}
		for _, p := range ports {
			f.setLast(p.ID, last)
		}
		if err := f.load(ctx); err != nil { // some of the tables may have been written
			return err
		}
		return err
	}
	blame := func(p *view.ServicePort, err error) {
		if !errors.Is(err, errUntried) {
			err = fmt.Errorf("the kernel refuses its rules beside those of other Service ports: %w", err)
		}
		bad = append(bad, &programmer.PortError{ID: p.ID, Err: err})
	}
	if len(known) > 0 == (len(fresh) > 0) { // or else divide begins with all of them
		if err := try(slices.Concat(known, fresh)); !errors.As(err, new(*rejectedError)) {
			return nil, err
		}
	}
	left := maxWrites
	for _, part := range [][]*view.ServicePort{known, fresh} {
		if err := divide(part, &left, try, blame); err != nil {
			return nil, err
		}
	}
	f.remember(bad)
	if !written {
		return bad, f.write(ctx, true)
	}
	return bad, nil
}

// divide tries elements together, in halves if they are refused, until each refused one is alone.
// It calls blame with it and the reason. left is the number of tries that are left. Without any,
// divide blames elements untried.
func divide[E any](elements []E, left *int, try func([]E) error, blame func(E, error)) error {
	if len(elements) == 0 {
		return nil
	}
	if *left == 0 {
		for _, e := range elements {
			blame(e, errUntried)
		}
		return nil
	}
	*left--
	err := try(elements)
	switch {
	case !errors.As(err, new(*rejectedError)):
		return err
	case len(elements) == 1:
		blame(elements[0], err)
		return nil
	}
	for half := range slices.Chunk(elements, (len(elements)+1)/2) {
		if err := divide(half, left, try, blame); err != nil {
			return err
		}
	}
	return nil
}

// checkOrdinary returns an error if the kernel refuses an ordinary Service port.
func (f *kernelFamily) checkOrdinary(ctx context.Context) error {
	if err := f.check(ctx, []*view.ServicePort{programmer.Ordinary(f.family)}); err != nil {
		return fmt.Errorf("%w: %w", programmer.ErrOrdinary, err)
	}
	return nil
}

// need is a rule of checkChain with one match or target that a Service port's rules have, and with
// values that do not depend on the Service port. There are few different needs.
type need struct {
	table table
	rule  string
}

// needsOf returns what the rules of a Service port need, each once.
func (d *dialect) needsOf(port *view.ServicePort) (needs []need) {
	ordinary := programmer.Ordinary(d.family)
	values := map[string]string{
		"--dport": "80", "--seconds": "1", "--probability": "0.5", "--name": checkChain, "--comment": "ordinary",
		"--to-destination": ordinary.Cluster.List()[0].Address.String(),
	}
	var rules [tables]bytes.Buffer
	d.checkRules(&rules, d.plan(port))
	for t := range rules {
		for rule := range strings.Lines(quoted.ReplaceAllString(rules[t].String(), "x")) {
			start := "-A " + checkChain
			var all []string
			words := strings.Fields(rule)
			for i, word := range words {
				switch {
				case word == "-p":
					start += " -p " + words[i+1] // some matches and targets are for one protocol only
				case word == "-m" || word == "-j":
					all = append(all, start+" "+word)
				case len(all) > 0:
					all[len(all)-1] += " " + cmp.Or(values[words[i-1]], word)
				}
			}
			for _, one := range all {
				if n := (need{table(t), one + "\n"}); !slices.Contains(needs, n) {
					needs = append(needs, n)
				}
			}
		}
	}
	return needs
}

// quoted matches the text of a comment.
var quoted = regexp.MustCompile(`"[^"]*"`)

// search returns the Service ports that the kernel refuses, given that it accepts rules at all. It
// tries their rules in chains that nothing refers to. A match that the kernel lacks may concern all
// of them. So search first tries what they need, and then single Service ports.
func (f *kernelFamily) search(ctx context.Context, ports []*view.ServicePort) (bad []*programmer.PortError, _ error) {
	if len(ports) == 0 {
		return nil, nil
	}
	err := f.check(ctx, ports)
	switch {
	case !errors.As(err, new(*rejectedError)):
		return nil, err
	case len(ports) == 1:
		return []*programmer.PortError{{ID: ports[0].ID, Err: err}}, nil
	}
	needs := map[need]error{} // why the kernel refuses them
	needsOf := make([][]need, len(ports))
	for i, port := range ports {
		needsOf[i] = f.needsOf(port)
		for _, n := range needsOf[i] {
			needs[n] = nil
		}
	}
	tryNeeds := func(needs []need) error {
		var rules [tables]bytes.Buffer
		for _, n := range needs {
			rules[n.table].WriteString(n.rule)
		}
		return f.tool.try(ctx, &rules)
	}
	left := maxTries
	order := slices.SortedFunc(maps.Keys(needs), func(a, b need) int { return strings.Compare(a.rule, b.rule) })
	if err := divide(order, &left, tryNeeds, func(n need, err error) { needs[n] = err }); err != nil {
		return nil, err
	}
	blame := func(port *view.ServicePort, err error) {
		bad = append(bad, &programmer.PortError{ID: port.ID, Err: err})
	}
	var rest []*view.ServicePort
	for i, port := range ports {
		refused := slices.IndexFunc(needsOf[i], func(n need) bool { return needs[n] != nil })
		if refused < 0 {
			rest = append(rest, port)
		} else {
			blame(port, needs[needsOf[i][refused]])
		}
	}
	err = divide(rest, &left, func(ports []*view.ServicePort) error { return f.check(ctx, ports) }, blame)
	return bad, err
}

// sorted returns the Service ports that are not to be removed, by name.
func sorted(ports servicePorts) []*view.ServicePort {
	all := slices.DeleteFunc(slices.Collect(maps.Values(ports)), func(p *view.ServicePort) bool { return p == nil })
	slices.SortFunc(all, func(a, b *view.ServicePort) int { return strings.Compare(a.ID.String(), b.ID.String()) })
	return all
}

// check returns an error if the kernel refuses the rules of these Service ports.
func (f *kernelFamily) check(ctx context.Context, ports []*view.ServicePort) error {
	var rules [tables]bytes.Buffer
	for _, port := range ports {
		f.checkRules(&rules, f.plan(port))
	}
	return f.tool.try(ctx, &rules)
}

// references matches the ends of rules that lead to chains of this package. No comment contains
// such a text, because comments have only one space, before the kind.
var references = regexp.MustCompile(`(?m) -[gj] ` + ChainPrefix + `\S+$`)

// checkRules writes the rules that are particular to a Service port as rules of checkChain that
// refer to no other chain.
func (d *dialect) checkRules(w *[tables]bytes.Buffer, port *plan) {
	var rules [tables]bytes.Buffer
	d.treeRules(&rules, checkChain, port)
	for _, c := range d.chainsOf(port) {
		var one bytes.Buffer
		c.write(&one)
		rules[c.table].Write(bytes.ReplaceAll(one.Bytes(), []byte("-A "+c.name+" "), []byte("-A "+checkChain+" ")))
	}
	for t := range rules {
		w[t].Write(references.ReplaceAll(rules[t].Bytes(), []byte(" -j RETURN")))
	}
}

// treeRules writes the rules that a Service port has in the trees, as rules of one chain.
func (d *dialect) treeRules(w *[tables]bytes.Buffer, chain string, port *plan) {
	for i, g := range port.Frontends {
		f := frontend{port, i}
		if f.way().way != nowhere {
			d.natRules(&w[nat], chain, []frontend{f})
		}
		if d.filtered(g) {
			d.filterRules(&w[filter], chain, []frontend{f})
		}
	}
	if port.HealthCheckPort != 0 {
		d.filterRules(&w[filter], chain, []frontend{{port, healthCheck}})
	}
	for _, a := range port.localAddresses() {
		d.hairpinRules(&w[nat], chain, []hairpin{{port, a}})
	}
}

func joinPortErrors(ports []*programmer.PortError) error {
	var all []error
	for _, p := range ports {
		all = append(all, p)
	}
	return errors.Join(all...)
}
