// Command run breaks a new cluster for a while as a seed says, prints a report, and fails if the
// cluster does not recover.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/slicecast/slicecast/internal/chaos"
	"github.com/slicecast/slicecast/internal/testenv/cluster"
)

func main() {
	proxy := flag.String("proxy", string(cluster.Slicecast), "what programs Services: slicecast or kube-proxy")
	programmer := flag.String("programmer", "nftables", "how it programs them: nftables or iptables")
	duration := flag.Duration("duration", time.Hour, "time of faults and churn")
	seed := flag.Uint64("seed", 0, "seed of the plan; 0 draws one")
	faults := flag.String("faults", "", "names of faults, separated by commas; empty means all")
	path := flag.String("report", "", "path of the report as JSON; empty means bin/chaos/PROXY-PROGRAMMER.json")
	show := flag.Bool("show", false, "print the plan, and do nothing")
	flag.Parse()
	if *seed == 0 {
		*seed = 1 + rand.Uint64N(1_000_000)
	}
	var names []string
	if *faults != "" {
		names = strings.Split(*faults, ",")
	}
	plan, err := chaos.NewPlan(*seed, *duration, names...)
	if err != nil {
		exit(err)
	}
	if *show {
		for _, s := range plan.Steps {
			fmt.Printf("%6.1fs  %s, target %d, for %s\n", s.At.Seconds(), s.Fault, s.Target, s.Lasts)
		}
		return
	}
	if *path == "" {
		*path = filepath.Join("bin", "chaos", *proxy+"-"+*programmer+".json")
	}
	cluster.Isolate()

	began := time.Now()
	options := chaos.Options{Proxy: cluster.Proxy(*proxy), Programmer: *programmer, Plan: plan}
	options.Logf = func(format string, args ...any) {
		fmt.Printf("%6.0fs  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
	}
	options.Logf("seed %d: %d faults and %d changes in %s", *seed, len(plan.Steps), len(plan.Changes), *duration)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	report, err := chaos.Run(ctx, options)
	stop()
	if report != nil {
		fmt.Print("\n", report.Text())
		err = errors.Join(err, os.MkdirAll(filepath.Dir(*path), 0o755), report.Write(*path))
		fmt.Printf("\nThe report is in %s\n", *path)
	}
	if err != nil {
		exit(err)
	}
	if len(report.Failures) > 0 {
		os.Exit(1)
	}
}

func exit(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
