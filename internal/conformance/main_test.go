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
	exceptionsFile = flag.String("conformance.exceptions", "testdata/exceptions.yaml", "file of what our programmers may do otherwise; empty: none")
	kubeProxies    = flag.String("conformance.kube-proxy", "nftables", "what of kube-proxy to run the cases against: ipvs, nftables, iptables-nft, iptables-legacy, several with commas")
	slicecasts     = flag.String("conformance.slicecast", "nftables,iptables-nft,iptables-legacy", "what of Slicecast to run the cases against: ipvs, nftables, iptables-nft, iptables-legacy, several with commas")
)

func TestMain(m *testing.M) {
	flag.Parse()
	testenv.Isolate(prepare)
	if err := takeCommands(); err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		os.Exit(1)
	}
	// The API server warns of what it would rather not have in Services.
	rest.SetDefaultWarningHandler(rest.NoWarnings{})
	goleak.VerifyTestMain(m)
}

// prepare gets what the tests will need, while there still is a network.
func prepare() error {
	errs := []error{controlplane.Prepare()}
	if *kubeProxies != "" {
		_, err := controlplane.KubernetesBinary(context.Background(), "kube-proxy")
		errs = append(errs, err)
	}
	if *slicecasts != "" {
		errs = append(errs, buildCommands())
	}
	return errors.Join(errs...)
}
