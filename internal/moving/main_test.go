// Package moving tests that a node goes from one programmer to another, and from kube-proxy to Slicecast, without a connection
// that is refused, and that with each programmer Services come back after somebody has removed the node's rules.
package moving

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"testing"

	agent "github.com/slicecast/slicecast/agent/app"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

// What is tested where the kernel has IPVS is more; see the package vm below.
var (
	programmers = flag.String("moving.programmers", "nftables:iptables-nft,nftables:iptables-legacy,iptables-nft:iptables-legacy", "pairs of programmers to move between, there and back, each of which is to repair its rules, too")
	kubeProxies = flag.String("moving.kube-proxy", "nftables:nftables,nftables:iptables-nft,iptables-nft:nftables,iptables-nft:iptables-nft,iptables-legacy:nftables",
		"modes of kube-proxy, each with the programmer that takes over")
)

// agentVariable has the test binary be slicecast-agent.
const agentVariable = "SLICECAST_TEST_AGENT"

func TestMain(m *testing.M) {
	if os.Getenv(agentVariable) != "" {
		runAgent()
	}
	flag.Parse()
	testenv.Main(m, prepare)
}

// prepare gets what the tests will need, while there still is a network.
func prepare() error {
	if *kubeProxies == "" {
		return nil
	}
	_, err := controlplane.KubernetesBinary(context.Background(), "kube-proxy")
	return errors.Join(controlplane.Prepare(), err)
}

func runAgent() {
	ctx, stop := daemon.SignalContext(context.Background())
	err := agent.NewCommand().ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}
