// Package kubeproxy removes what kube-proxy has left on a node, in any of its modes, when Slicecast has taken its place. It removes
// nothing else: what is Slicecast's, the kubelet's (KUBE-FIREWALL, KUBE-KUBELET-CANARY, KUBE-IPTABLES-HINT) or
// anybody else's is as before, and connections, which conntrack has the translations of, go on. Only those end that kube-proxy's IPVS
// leads, and those of the node's own that come from an address of its device.
package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/programmer/ipvs"
	"github.com/slicecast/slicecast/internal/xtables"
)

// Cleanup removes what kube-proxy has left on this node. It is refused while a kube-proxy runs, which would make it anew. Nothing
// there is no error; what can't be removed does not keep the rest.
func Cleanup(ctx context.Context) error {
	if where := running(ctx); where != "" {
		return fmt.Errorf("kube-proxy runs on this node (%s) and would put back what is removed: end it first, e.g. with "+
			"kubectl -n kube-system delete daemonset kube-proxy", where)
	}
	return errors.Join(
		ipvs.CleanupKubeProxy(ctx),
		cleanupIPTables(ctx),
		cleanupNFTables(),
		ipvs.CleanupKubeProxySets(), // which the rules of iptables refer to
	)
}

// nftablesTable is kube-proxy's table in mode nftables.
const nftablesTable = "kube-proxy"

func cleanupNFTables() error {
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open a socket for nftables: %w", err)
	}
	all, err := conn.ListTables()
	switch {
	case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL):
		return nil // the kernel has no nftables
	case err != nil:
		return fmt.Errorf("list nftables tables: %w", err)
	}
	tables := slices.DeleteFunc(all, func(t *nftables.Table) bool {
		return t.Name != nftablesTable || t.Family != nftables.TableFamilyIPv4 && t.Family != nftables.TableFamilyIPv6
	})
	if len(tables) == 0 {
		return nil
	}
	// First the rules, which would refuse what they do not find in the maps when these go.
	remove := func(of func(*nftables.Table)) error {
		for _, t := range tables {
			of(t)
		}
		if err := conn.Flush(); err != nil {
			return fmt.Errorf("remove the nftables tables %s: %w", nftablesTable, err)
		}
		return nil
	}
	if err := remove(conn.FlushTable); err != nil {
		return err
	}
	xtables.Grace()
	return remove(conn.DelTable)
}
