// This file has the flags of the conformance tests, and provides their binaries before the tests
// enter their namespaces.
package conformance

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

// See the package's documentation.
var (
	scenarioDir    = flag.String("conformance.dir", "testdata/scenarios", "folder of the cases")
	exceptionsFile = flag.String("conformance.exceptions", "testdata/exceptions.yaml", "file of allowed deviations of Slicecast's programmers; empty means none")
	kubeProxies    = flag.String("conformance.kube-proxy", "nftables", "comma-separated variants of kube-proxy to run the cases against: ipvs, nftables, iptables-nft, iptables-legacy")
	record         = flag.String("conformance.record", "", "folder for the outcomes of kube-proxy with the cases of known bugs, each held to what Slicecast is held to; no other cases are played; - prints them")
	broken         = flag.String("conformance.broken", "nftables,iptables-nft", "comma-separated variants of kube-proxy whose rules are broken; see -conformance.kube-proxy")
	patience       = flag.Int("conformance.patience", 1, "factor of the bounds of what agents may take, for slow machines")
	slicecasts     = flag.String("conformance.slicecast", "nftables,iptables-nft,iptables-legacy", "comma-separated variants of Slicecast to run the cases against: ipvs, nftables, iptables-nft, iptables-legacy")
)

func TestMain(m *testing.M) {
	flag.Parse()
	testenv.Isolate(prepare)
	if err := takeCommands(); err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		os.Exit(1)
	}
	// The API server warns about discouraged fields of Services.
	rest.SetDefaultWarningHandler(rest.NoWarnings{})
	goleak.VerifyTestMain(m)
}

// prepare provides the binaries for the tests while there still is a network.
func prepare() error {
	errs := []error{controlplane.Prepare()}
	if *kubeProxies+*broken != "" {
		_, err := controlplane.KubernetesBinary(context.Background(), "kube-proxy")
		errs = append(errs, err)
	}
	if *slicecasts != "" {
		errs = append(errs, buildCommands())
	}
	return errors.Join(errs...)
}
