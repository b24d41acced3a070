// Command run runs upstream's end-to-end tests in a new cluster, prints a summary, and fails if a
// case fails.
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
	"github.com/slicecast/slicecast/internal/testenv/upstream"
)

func main() {
	var options cluster.Options
	var run upstream.Options
	flag.IntVar(&options.Nodes, "nodes", 3, "number of nodes")
	proxy := flag.String("proxy", string(cluster.Slicecast), "what programs Services: slicecast or kube-proxy")
	flag.StringVar(&options.Programmer, "programmer", "nftables", "how it programs them: nftables or iptables")
	flag.StringVar(&run.Focus, "focus", "", "regular expression for the names of the cases to run; empty runs all")
	record := flag.Bool("record", false, "write the outcomes to internal/testenv/upstream/results")
	flag.Parse()
	options.Proxy = cluster.Proxy(*proxy)
	combination := *proxy + "-" + options.Programmer
	run.Dir = filepath.Join("bin/e2e", combination)
	began := time.Now()
	run.Logf = func(format string, args ...any) {
		fmt.Printf("%6.0fs  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
	}
	options.Logf = run.Logf
	cluster.Isolate(upstream.Prepare)

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	results, err := runTests(ctx, options, run)
	if err == nil && *record {
		err = upstream.Record(combination, results)
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Printf("\n%s: %s\n", combination, upstream.Summary(results))
	fmt.Println("The reports are in " + run.Dir)
	for _, result := range results {
		if result.Failed() {
			os.Exit(1)
		}
	}
}

func runTests(ctx context.Context, options cluster.Options, run upstream.Options) (results []upstream.Result, err error) {
	c, err := cluster.Start(ctx, options)
	if err != nil {
		return nil, err
	}
	results, err = upstream.Run(ctx, c, run)
	if stopErr := c.Stop(); err == nil {
		err = stopErr
	}
	return results, err
}
