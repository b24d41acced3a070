// Command run brings up a cluster, says how to use it, and holds it until it is interrupted.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/slicecast/slicecast/internal/testenv/cluster"
)

func main() {
	var options cluster.Options
	flag.IntVar(&options.Nodes, "nodes", 3, "number of nodes")
	proxy := flag.String("proxy", string(cluster.Slicecast), "what programs Services: slicecast, kube-proxy or none")
	flag.StringVar(&options.Programmer, "programmer", "nftables", "how it programs them: nftables or iptables")
	flag.Parse()
	options.Proxy = cluster.Proxy(*proxy)
	began := time.Now()
	options.Logf = func(format string, args ...any) {
		fmt.Printf("%5.1fs  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
	}
	cluster.Isolate()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, options)
	interrupted := ctx.Err() != nil
	stop()
	if err != nil && !interrupted {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, options cluster.Options) error {
	c, err := cluster.Start(ctx, options)
	if err != nil {
		return err
	}
	rules := "nft list ruleset"
	if options.Programmer == "iptables" {
		rules = "iptables-save"
	}
	fmt.Printf(`
The cluster is up. In another terminal:

  export KUBECONFIG=%s PATH=%s:$PWD/bin:$PATH
  kubectl get nodes --output=wide --label-columns=topology.kubernetes.io/zone
  kubectl get pods --all-namespaces --output=wide
  kubectl create deployment web --image=%s --replicas=2 -- /agnhost netexec
  kubectl expose deployment web --port=80 --target-port=8080
  kubectl exec deployment/web -- curl -s web/hostname
  nsenter --all --target=$(pgrep -f '%[5]s/node-1') %[6]s
  kubectl slicecast nodes

To break it, and to find out how, see docs/debug.md.

The logs of the nodes are in %[4]s/logs. Ctrl-C removes everything.
`, c.OutsideKubeconfig, filepath.Dir(c.KubectlPath), cluster.AgnhostImage, c.Dir, filepath.Base(c.Dir), rules)
	if options.Proxy != cluster.Slicecast {
		fmt.Print(`
The nodes have the images that the chart of this tree installs:

  alias helm=internal/tools/helm.sh
  helm install slicecast deploy/helm/slicecast --namespace=kube-system
  kubectl -n slicecast-agents rollout status daemonset/slicecast-agent
`)
	}
	<-ctx.Done()
	fmt.Println("Stopping")
	return c.Stop()
}
