// Package kubeproxy finds a kube-proxy that runs on the node. It also removes what kube-proxy has
// left on a node, in any of its modes, once Slicecast has taken its place. It removes nothing else:
// what belongs to Slicecast, to the kubelet (KUBE-FIREWALL, KUBE-KUBELET-CANARY,
// KUBE-IPTABLES-HINT) or to others stays as it was.
//
// Connections go on, because conntrack has their translations. There are two exceptions:
// connections that kube-proxy's IPVS forwards end, and so do the node's own connections from an
// address of kube-proxy's device.
package kubeproxy

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/programmer/ipvs"
	"github.com/slicecast/slicecast/internal/model"
)

// Cleanup removes what kube-proxy has left on this node. It returns an error if kube-proxy is
// running, because kube-proxy would create everything again. It is no error if there is nothing to
// remove. If something cannot be removed, Cleanup still removes the rest.
func Cleanup(ctx context.Context) error {
	if where := Running(ctx); where != "" {
		return fmt.Errorf("kube-proxy runs on this node (%s) and would put back what is removed: end it first, e.g. "+
			"with kubectl -n kube-system delete daemonset kube-proxy", where)
	}
	return errors.Join(
		ipvs.CleanupKubeProxy(ctx),
		cleanupIPTables(ctx),
		cleanupNFTables(),
		ipvs.CleanupKubeProxySets(), // the rules of iptables refer to them, so they go last
	)
}

// nftablesTable is the name of kube-proxy's tables in mode nftables.
const nftablesTable = "kube-proxy"

func cleanupNFTables() error {
	return withNFTables(func(conn *nft.Conn, family model.Family) error {
		if err := conn.RemoveTable(nft.Table{Family: nft.FamilyOf(family), Name: nftablesTable}); err != nil {
			return fmt.Errorf("remove the %v nftables table %s: %w", family, nftablesTable, err)
		}
		return nil
	})
}

// withNFTables calls remove for each IP family, if the kernel has nftables.
func withNFTables(remove func(*nft.Conn, model.Family) error) error {
	conn, err := nft.Dial()
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open a socket for nftables: %w", err)
	}
	defer conn.Close()
	return errors.Join(remove(conn, model.IPv4), remove(conn, model.IPv6))
}
