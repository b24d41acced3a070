package iptables

import (
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
	err := eachKind(func(family model.Family, variant Variant) error {
		_, err := cleanup(ctx, family, variant, run, nil)
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
	missing := false
	err := eachKind(func(family model.Family, variant Variant) error {
		keeps, err := cleanup(ctx, family, variant, runCommand, newDialect(family, mark, false))
		if keeps {
			kept = append(kept, programName(family, variant))
		}
		if errors.Is(err, errNoAccept) {
			missing = true
			return nil
		}
		return err
	})
	log := cmp.Or(options.Log, slog.Default())
	if len(kept) > 0 {
		log.Warn("The policy of iptables' FORWARD chain is DROP, kept the chain "+forwardChain+
			" that accepts forwarded traffic of Services; restart the agent if the policy or these rules change",
			"programs", kept)
	}
	if missing {
		log.Error("The policy of iptables' FORWARD chain is DROP, and there are no iptables commands to accept " +
			"forwarded traffic of Services; install them, or accept the traffic by other rules")
	}
	if left {
		err = errors.Join(err, removeCounters())
	}
	return err
}

// eachKind calls each for every IP family and variant.
func eachKind(each func(family model.Family, variant Variant) error) error {
	var errs []error
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		for _, variant := range []Variant{NFT, Legacy} {
			if err := each(family, variant); err != nil {
				errs = append(errs, fmt.Errorf("clean up with %s: %w", programName(family, variant), err))
			}
		}
	}
	return errors.Join(errs...)
}

// mayBeLeft reports whether chains of this package may exist, at little cost.
func mayBeLeft() bool {
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		for t, chains := range map[table][]string{nat: {ServicesChain}, filter: {forwardChain, localnetChain}} {
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

// errNoAccept reports that this machine lacks the program to accept what FORWARD drops.
var errNoAccept = errors.New("there are no iptables commands")

// cleanup removes what the kernel holds of this package in a variant. If keep is not nil and the
// policy of FORWARD is DROP, it keeps a chain that accepts what is forwarded for Services. Without
// a program to write that chain, the table filter stays as it is, and the error is errNoAccept.
func cleanup(
	ctx context.Context, family model.Family, variant Variant, run runner, keep *dialect,
) (kept bool, err error) {
	if variant == Legacy {
		return cleanupLegacy(ctx, family, run, keep)
	}
	guard, err := nft.HasChain(family, filter.String(), localnetChain)
	if err == nil && guard {
		guard, err = programmer.NeedsGuard()
	}
	if err != nil {
		return false, err
	}
	remove := func(t table, kept string) error {
		own := func(chain string) bool { return isOwn(chain) && chain != kept && !(guard && chain == localnetChain) }
		return withTable(family, t, func(c *nft.Conn, of nft.Table) error { return c.RemoveChains(of, own) })
	}
	if err := remove(nat, ""); err != nil {
		return false, err
	}
	forward, _, err := nft.FindChain(family, filter.String(), "FORWARD")
	if err != nil {
		return false, err
	}
	if keep == nil || !forward.Drops {
		return false, remove(filter, "")
	}
	t, err := findTool(family, variant, run)
	if errors.Is(err, exec.ErrNotFound) {
		return false, errNoAccept
	}
	if err == nil {
		err = t.keepForward(ctx, keep)
	}
	if err != nil {
		return false, err
	}
	return true, remove(filter, forwardChain)
}

// keepForward reduces forwardChain in nf_tables to what accepts packets.
func (t *tool) keepForward(ctx context.Context, keep *dialect) error {
	x := newTransaction(newChainHashes())
	putForward(x, keep)
	if err := t.restore(ctx, x.text()); err != nil {
		return err
	}
	hooked := false
	err := withTable(t.family, filter, func(c *nft.Conn, of nft.Table) error {
		_, refs, _, err := c.FindChains(of, func(chain string) bool { return chain == forwardChain })
		hooked = slices.ContainsFunc(refs, func(r nft.Reference) bool { return r.Chain == "FORWARD" })
		return err
	})
	if err != nil || hooked {
		return err
	}
	return t.hook(forwardHook, false)
}

func putForward(x *transaction, keep *dialect) {
	putParts(x, filter, forwardChain, part{"-j ACCEPT", keep.accepted()})
}

// cleanupLegacy is cleanup for the legacy variant, which only its programs can change. The kernel
// says whether there is something to change.
func cleanupLegacy(ctx context.Context, family model.Family, run runner, keep *dialect) (kept bool, err error) {
	exists, err := xtables.HasLegacy(family, filter.String())
	if err != nil {
		return false, err
	}
	left, guard := false, false
	for t := range tables {
		chains, err := xtables.Chains(family, t.String())
		if err != nil {
			return false, err
		}
		left = left || slices.ContainsFunc(chains, isOwn)
		guard = guard || slices.Contains(chains, localnetChain)
	}
	if guard {
		if guard, err = programmer.NeedsGuard(); err != nil {
			return false, err
		}
	}
	if !left && (keep == nil || !exists) {
		return false, nil
	}
	t, err := findTool(family, Legacy, run)
	if errors.Is(err, exec.ErrNotFound) && !left {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	output, err := t.save(ctx) // asking for a table by name would make the kernel load it
	if err != nil {
		return false, err
	}
	held := parseSave(output)
	x := newTransaction(held.chains)
	keeps := keep != nil && held.drops
	if keeps {
		putForward(x, keep)
	}
	if guard {
		putLocalnet(x)
	}
	x.removeOthers(&held)
	if err := t.restore(ctx, x.text()); err != nil {
		return false, err
	}
	if keeps && !slices.Contains(held.hooks, forwardHook) {
		return true, t.hook(forwardHook, false)
	}
	return keeps, nil
}

// findTool returns the programs of a variant, under its own name or as the default.
func findTool(family model.Family, variant Variant, run runner) (t *tool, err error) {
	for _, name := range []Variant{variant, DefaultVariant} {
		var errName error
		if t, errName = newTool(family, name, run); errName == nil && t.variant == variant {
			return t, nil
		}
		err = cmp.Or(err, errName)
	}
	return nil, cmp.Or(err, fmt.Errorf("%s: %w", programName(family, variant), exec.ErrNotFound))
}
