package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/xtables"
)

// Detector finds a kube-proxy by looking again and again. Beside what Running finds, it finds a
// kube-proxy that another container hides and that answers nowhere, most likely because the agent
// has its ports: the rules of such a kube-proxy appear, or are made again. Rules that were there at
// the first look count only once they are made again, because they may be leftovers.
//
// The zero value is ready for use. Only one goroutine uses a Detector.
type Detector struct {
	// seen is what the last look has found; nil means that nothing can be compared with it.
	seen traces
	// made names the traces that were made since the first look, and that are still there.
	made map[string]bool
}

// Find describes a kube-proxy that programs this network namespace, or returns "" if it finds none.
// An error means that some rules could not be read. The rest of the answer holds.
func (d *Detector) Find(ctx context.Context) (where string, err error) {
	now, err := look()
	if err != nil {
		return Running(ctx), err
	}
	if where := Running(ctx); where != "" {
		// What this kube-proxy makes until it stops says nothing later on.
		d.seen, d.made = nil, nil
		return where, nil
	}
	if d.made == nil {
		d.made = make(map[string]bool)
	}
	for name := range d.made {
		if _, there := now[name]; !there {
			delete(d.made, name)
		}
	}
	for name, mark := range now {
		if d.seen != nil && d.seen[name] != mark {
			d.made[name] = true
		}
	}
	d.seen = now
	if len(d.made) == 0 {
		return "", nil
	}
	var names []string
	for name := range d.made {
		names = append(names, name)
	}
	slices.Sort(names)
	return "this container does not see it, but it has made rules: " + strings.Join(names, ", "), nil
}

// traces are what kube-proxy leaves in the kernel: descriptions, with marks that differ each time
// kube-proxy makes the rules. A mark is never 0.
type traces map[string]uint64

// These chains exist wherever kube-proxy has programmed something. In mode nftables, kube-proxy
// makes its base chains again when it starts. In its other modes, it makes the rules of
// postroutingChain again with each change, and legacyCanary is how it notices that others have
// flushed the tables.
const (
	nftablesChain    = "nat-prerouting"
	postroutingChain = "KUBE-POSTROUTING"
	legacyCanary     = "KUBE-PROXY-CANARY"
)

// look returns kube-proxy's traces in this network namespace.
func look() (traces, error) {
	found := make(traces)
	var errs []error
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		for table, chain := range map[string]string{nftablesTable: nftablesChain, "nat": postroutingChain} {
			mark, err := nft.LastHandle(family, table, chain)
			errs = append(errs, err)
			if mark != 0 {
				found[fmt.Sprintf("the %v chain %s in table %s", family, chain, table)] = mark
			}
		}
		has, err := hasLegacyCanary(family)
		errs = append(errs, err)
		if has {
			found[fmt.Sprintf("the %v chain %s of legacy iptables", family, legacyCanary)] = 1
		}
	}
	return found, errors.Join(errs...)
}

// hasLegacyCanary reports whether the legacy variant of iptables has kube-proxy's canary. It is in
// mangle, which is mostly small.
func hasLegacyCanary(family model.Family) (bool, error) {
	names, err := xtables.Chains(family, "mangle")
	return slices.Contains(names, legacyCanary), err
}
