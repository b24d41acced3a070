package iptables

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os/exec"
	"slices"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/xtables"
)

// Cleanup removes the chains of this package, the rules that refer to them, and the counters, for
// every variant and IP family that this machine has.
func Cleanup(ctx context.Context) error { return cleanupAll(ctx, runCommand) }

func cleanupAll(ctx context.Context, run runner) error {
	if !mayBeLeft() {
		return removeCounters()
	}
	err := eachProgram(func(_ model.Family, name string) error {
		_, err := cleanup(ctx, name, run, nil)
		return err
	})
	return errors.Join(err, removeCounters())
}

// Retire removes what Cleanup removes, for a node that another programmer serves. There is one
// exception. If the policy of FORWARD is DROP, as Docker sets it, the chain SLICECAST-FORWARD stays
// or is created. It accepts packets that are marked for masquerading and packets of established
// connections, as it does for this package's Programmer. Rules elsewhere cannot accept what a base
// chain of iptables drops. Retire logs that it keeps the chain.
func Retire(ctx context.Context, options Options) error {
	left := mayBeLeft()
	if !left && !mayDrop() {
		return nil
	}
	mark := cmp.Or(options.MasqueradeMark, programmer.DefaultMasqueradeMark)
	var kept []string
	err := eachProgram(func(family model.Family, name string) error {
		keeps, err := cleanup(ctx, name, runCommand, newDialect(family, mark, false))
		if keeps {
			kept = append(kept, name)
		}
		return err
	})
	log := cmp.Or(options.Log, slog.Default())
	switch {
	case len(kept) > 0:
		log.Warn("The policy of iptables' FORWARD chain is DROP, kept the chain "+forwardChain+
			" that accepts forwarded traffic of Services; restart the agent if the policy or these rules change",
			"programs", kept)
	case err == nil && mayDrop():
		log.Error("The policy of iptables' FORWARD chain is DROP, and there are no iptables commands to accept " +
			"forwarded traffic of Services; install them, or accept the traffic by other rules")
	}
	if left {
		err = errors.Join(err, removeCounters())
	}
	return err
}

// eachProgram calls each with the name of every program that may exist.
func eachProgram(each func(family model.Family, name string) error) error {
	var errs []error
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		for _, variant := range []Variant{DefaultVariant, NFT, Legacy} {
			name := programName(family, variant)
			if err := each(family, name); err != nil {
				errs = append(errs, fmt.Errorf("clean up with %s: %w", name, err))
			}
		}
	}
	return errors.Join(errs...)
}

// mayBeLeft reports whether chains of this package may exist. It asks the kernel, which costs
// little. The programs read all rules, of which others may have many.
func mayBeLeft() bool {
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		for t, chains := range map[table][]string{nat: {servicesChain}, filter: {forwardChain, localnetChain}} {
			if has, err := xtables.HasLegacy(family, t.String()); has || err != nil {
				return true
			}
			for _, chain := range chains {
				if has, err := nft.HasChain(family, t.String(), chain); has || err != nil {
					return true
				}
			}
		}
	}
	return false
}

// mayDrop reports whether the policy of FORWARD may be DROP, at the same low cost. It does not look
// at legacy tables, for which mayBeLeft is always true.
func mayDrop() bool {
	return slices.ContainsFunc([]model.Family{model.IPv4, model.IPv6}, func(family model.Family) bool {
		hook, _, err := nft.FindChain(family, filter.String(), "FORWARD")
		return hook.Drops || err != nil
	})
}

// cleanup removes what a program finds. If keep is not nil and the policy of FORWARD is DROP, it
// keeps a chain that accepts what is forwarded for Services.
func cleanup(ctx context.Context, name string, run runner, keep *dialect) (kept bool, err error) {
	held, t, err := find(ctx, name, run)
	if err != nil || t == nil {
		return false, err
	}
	x := newTransaction(held.chains)
	keeps := keep != nil && held.drops
	if keeps {
		x.put(filter, forwardChain, func(w *bytes.Buffer) {
			for _, m := range keep.accepted() {
				w.WriteString(m.rule(forwardChain, "-j ACCEPT"))
			}
		})
	}
	x.removeOthers(held.hooks)
	if err := t.restore(ctx, x.text()); err != nil {
		return false, err
	}
	if keeps && !slices.Contains(held.hooks, forwardHook) {
		return true, t.hook(forwardHook, false)
	}
	return keeps, nil
}

// find returns what a program finds of this package. t is nil if this machine lacks the program or
// the kernel does not support it, so that nothing can have been created with it.
func find(ctx context.Context, name string, run runner) (held saved, t *tool, err error) {
	if _, err := exec.LookPath(name); errors.Is(err, exec.ErrNotFound) {
		return held, nil, nil
	}
	var output []byte
	t, err = newTool(name, run)
	if err == nil {
		output, err = t.save(ctx) // asking for a table by name would make the legacy variant load it
	}
	if command := (*commandError)(nil); errors.As(err, &command) && command.unsupported() {
		return held, nil, nil
	}
	return parseSave(output), t, err
}
