package app

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/loadtest/generate"
)

// spareFiles is how many files the process needs beside those for nodes' connections.
const spareFiles = 64

// Options are the flags of "run".
type Options struct {
	Nodes          int
	Services       int
	Endpoints      int
	LargeServices  int
	LargeEndpoints int
	Churn          float64
	Duration       time.Duration
	WarmUp         time.Duration
	Seed           uint64
	Floor          bool
	Restart        bool
	GRPCGo         bool

	Server            string
	ServerName        string
	ServerPID         int
	CAFile            string
	NodeCACertFile    string
	NodeCAKeyFile     string
	InsecurePlaintext bool

	Connecting int
	Timeout    time.Duration
	Log        daemon.LogOptions
	Presentation
}

// AddFlags adds the flags, with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.IntVar(&o.Nodes, "nodes", 100, "simulated nodes")
	fs.IntVar(&o.Services, "services", 1000, "Services that the server started has")
	fs.IntVar(&o.Endpoints, "endpoints", 50, "endpoints of each Service")
	fs.IntVar(&o.LargeServices, "large-services", 1, "more Services that it has: large ones. If there are any, it is their endpoints that change")
	fs.IntVar(&o.LargeEndpoints, "large-endpoints", 5000, "endpoints of each large Service")
	fs.Float64Var(&o.Churn, "churn", 5, "changes a second: an endpoint turns not ready, or ready again; 0: none")
	fs.DurationVar(&o.Duration, "duration", time.Minute, "how long to measure")
	fs.DurationVar(&o.WarmUp, "warm-up", 5*time.Second, "churn before what is measured")
	fs.Uint64Var(&o.Seed, "seed", 1, "of where endpoints are, and in which order they change")
	fs.BoolVar(&o.Floor, "floor", false,
		"after the churn, measure what the server's process pays for as many connections, bytes and writes over TLS and nothing else")
	fs.BoolVar(&o.Restart, "restart", false,
		"after that, kill the server (SIGKILL), start it again with the same state, and measure how all nodes come back")

	fs.BoolVar(&o.GRPCGo, "grpc-go", false,
		"for comparison: nodes do not offer the agents' protocol in TLS, so that grpc-go serves them instead of the server's own HTTP/2")

	fs.StringVar(&o.Server, "server", "",
		"address (host:port) of a running server, whose own changes are then observed for --duration; default: start one with generated state")
	fs.StringVar(&o.CAFile, "ca-file", "", "with --server: CA certificates, in PEM, that its certificate is checked against")
	fs.StringVar(&o.ServerName, "server-name", "", "with --server: name that its certificate must have; default: the host of --server")
	fs.StringVar(&o.NodeCACertFile, "node-ca-cert-file", "",
		"with --server: certificate, in PEM, of a CA that the server accepts for nodes (its --client-ca-file); the nodes' are made with it")
	fs.StringVar(&o.NodeCAKeyFile, "node-ca-key-file", "", "key of --node-ca-cert-file, in PEM")
	fs.BoolVar(&o.InsecurePlaintext, "insecure-plaintext", false, "with --server: talk to it without TLS")
	fs.IntVar(&o.ServerPID, "server-pid", 0, "with --server: its process on this machine, for its CPU time and memory")

	fs.IntVar(&o.Connecting, "connecting", 32, "nodes that connect and get their first state at the same time; as many as --nodes: all at once")
	fs.DurationVar(&o.Timeout, "timeout", 5*time.Minute, "how long nodes may take for their first state, and after the churn for the last change")
	o.Presentation.AddFlags(fs)
	o.Log.AddFlags(fs)
	// Thousands of nodes have little to say that counts.
	o.Log.Level = "warn"
	fs.Lookup("log-level").DefValue = o.Log.Level
}

// validate finds all that is wrong with the options.
func (o *Options) validate() error {
	var errs []error
	wrong := func(is bool, format string, args ...any) {
		if is {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	wrong(o.Nodes < 1, "--nodes is %d: use at least 1", o.Nodes)
	wrong(o.Churn < 0, "--churn is %g: use 0 or more", o.Churn)
	wrong(o.Duration <= 0, "--duration is %v: use a positive duration", o.Duration)
	wrong(o.WarmUp < 0, "--warm-up is %v: use 0 or more", o.WarmUp)
	wrong(o.Connecting < 1, "--connecting is %d: use at least 1", o.Connecting)
	wrong(o.Timeout <= 0, "--timeout is %v: use a positive duration", o.Timeout)
	files := o.CAFile != "" && o.NodeCACertFile != "" && o.NodeCAKeyFile != ""
	anyFile := o.CAFile != "" || o.NodeCACertFile != "" || o.NodeCAKeyFile != "" || o.ServerName != ""
	switch {
	case o.Server == "":
		wrong(anyFile || o.InsecurePlaintext || o.ServerPID != 0, "--ca-file, --server-name, --node-ca-cert-file, --node-ca-key-file, "+
			"--insecure-plaintext and --server-pid are about a running server: add --server")
		if err := o.cluster().Validate(); err != nil {
			errs = append(errs, err)
		}
	case o.Floor || o.Restart:
		wrong(true, "--floor and --restart are about a server of the run's own: leave --server out")
	case o.InsecurePlaintext:
		wrong(anyFile || o.GRPCGo, "--insecure-plaintext excludes --ca-file, --server-name, --node-ca-cert-file, --node-ca-key-file and --grpc-go")
	default:
		wrong(!files, "--server needs --ca-file, --node-ca-cert-file and --node-ca-key-file (or --insecure-plaintext, if the server has it)")
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		errs = append(errs, fmt.Errorf("limit of open files: %w", err))
	}
	open := uint64(o.Nodes)
	if o.Floor {
		open *= 2
	}
	wrong(open+spareFiles > limit.Max, "--nodes is %d, for which a process has %d files open, and it may have %d: use fewer, or raise the limit "+
		"(ulimit -Hn)", o.Nodes, open+spareFiles, limit.Max)
	errs = append(errs, o.Presentation.Validate())
	if err := errors.Join(errs...); err != nil {
		return usageError{err}
	}
	return nil
}

func (o *Options) cluster() generate.Config {
	return generate.Config{
		Nodes: o.Nodes, Services: o.Services, Endpoints: o.Endpoints, LargeServices: o.LargeServices, LargeEndpoints: o.LargeEndpoints,
		Seed: o.Seed,
	}
}
