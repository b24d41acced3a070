// Package moving tests that a node can change from one programmer to another, and from kube-proxy
// to Slicecast, without a refused connection. It also tests that with each programmer Services work
// again after another program has removed the node's rules.
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

// Package vm below tests more combinations, because its kernel has IPVS.
var (
	programmers = flag.String("moving.programmers", "nftables:iptables-nft,nftables:iptables-legacy,iptables-nft:iptables-legacy", "pairs of programmers to move between in both directions; each programmer must also repair its rules")
	kubeProxies = flag.String("moving.kube-proxy", "nftables:nftables,nftables:iptables-nft,iptables-nft:nftables,iptables-nft:iptables-nft,iptables-legacy:nftables",
		"modes of kube-proxy, each with the programmer that takes over")
)

// agentVariable is the name of an environment variable that makes the test binary run as
// slicecast-agent.
const agentVariable = "SLICECAST_TEST_AGENT"

func TestMain(m *testing.M) {
	if os.Getenv(agentVariable) != "" {
		runAgent()
	}
	flag.Parse()
	testenv.Main(m, prepare)
}

// prepare provides the binaries for the tests while there still is a network.
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
