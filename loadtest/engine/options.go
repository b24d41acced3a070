// Package engine runs a scenario: it starts what takes part, has nodes connect and the state change, measures what that costs,
// compares all nodes with the true state, and reports. What it starts are processes, so that the operating system tells what each
// has used, and all of them end with it.
package engine

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/loadtest/generate"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/scenario"
)

// The commands with which this program starts itself: as a server, and as a worker.
const (
	ServeCommand = "serve-target"
	WorkCommand  = "work"
)

// Own is the value of --kube-apiserver that stands for one that the run starts.
const Own = "own"

const (
	// spareFiles is how many files a process needs beside those for nodes' connections.
	spareFiles = 64
	// maxPerWorker is how many nodes a worker has at most; more make several.
	maxPerWorker = 15_000
)

// Options say what to run, and against whom.
type Options struct {
	// Peer is who distributes the state: Slicecast, or an API server that nodes watch.
	Peer report.Peer
	// Scenario is the name or file of one; the parameters that were set as flags replace its own.
	Scenario string
	flags    *pflag.FlagSet
	Repeats  int

	KubeAPIServer  string
	WriteNamespace string

	Server            string
	ServerName        string
	ServerPID         int
	CAFile            string
	NodeCACertFile    string
	NodeCAKeyFile     string
	ClientCertFile    string
	ClientKeyFile     string
	InsecurePlaintext bool

	PerWorker int
	Timeout   time.Duration
	Log       daemon.LogOptions
}

// AddFlags adds the flags that a peer has, with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.flags = fs
	if o.Peer == "" {
		o.Peer = report.Slicecast
	}
	fs.StringVar(&o.Scenario, "scenario", scenario.Default,
		"what to play: the name of a scenario that comes with the program, or a YAML file; the flags below replace its parameters")
	new(scenario.Scenario).AddFlags(fs)
	if o.Peer == report.KubeAPIServer {
		for _, name := range ofSlicecast {
			fs.Lookup(name).Hidden = true
		}
		fs.Lookup("event").Usage = "what happens meanwhile: reconnect (all connections are cut), none"
	}
	fs.IntVar(&o.Repeats, "repeats", 1, "how often to play it, each time from the start; the report tells how far the figures were apart")

	api := "kubeconfig of a Kubernetes API server whose state is distributed, or own: start one, as the tests do, with etcd and kube-apiserver of this repository's folder, or of $SLICECAST_BINARIES"
	if o.Peer == report.KubeAPIServer {
		fs.StringVar(&o.KubeAPIServer, "kube-apiserver", Own, api)
		fs.IntVar(&o.ServerPID, "server-pid", 0, "the API server's process, if it runs on this machine, for its CPU time and memory")
	} else {
		fs.StringVar(&o.KubeAPIServer, "kube-apiserver", "", api+"; default: the servers generate their state")
		fs.StringVar(&o.Server, "server", "",
			"address (host:port) of a running Slicecast server, whose own changes are then observed for --duration; default: start one")
		fs.StringVar(&o.CAFile, "ca-file", "", "with --server: CA certificates, in PEM, that its certificate is checked against")
		fs.StringVar(&o.ServerName, "server-name", "", "with --server: name that its certificate must have; default: the host of --server")
		fs.StringVar(&o.NodeCACertFile, "node-ca-cert-file", "",
			"with --server: certificate, in PEM, of a CA that the server accepts for nodes (its --client-ca-file); the nodes' are made with it")
		fs.StringVar(&o.NodeCAKeyFile, "node-ca-key-file", "", "key of --node-ca-cert-file, in PEM")
		fs.StringVar(&o.ClientCertFile, "client-cert-file", "", "with --server, instead of --node-ca-cert-file: a client certificate, in PEM, that "+
			"may be any node (of the organization system:masters); all nodes show it")
		fs.StringVar(&o.ClientKeyFile, "client-key-file", "", "key of --client-cert-file, in PEM")
		fs.BoolVar(&o.InsecurePlaintext, "insecure-plaintext", false, "with --server: talk to it without TLS")
		fs.IntVar(&o.ServerPID, "server-pid", 0, "with --server: its process on this machine, for its CPU time and memory")
	}
	fs.StringVar(&o.WriteNamespace, "write-namespace", "", "with the kubeconfig of a cluster: a namespace to make for the scenario's Services and "+
		"EndpointSlices, and to remove at the end. They have a service-proxy-name, so that the cluster's own nodes program nothing for them, but kube-proxies and "+
		"Slicecast's servers get all the slices. Without it nothing is written, and the cluster's own changes are observed for --duration")

	fs.IntVar(&o.PerWorker, "nodes-per-process", maxPerWorker, "more nodes than this are simulated by several processes")
	fs.DurationVar(&o.Timeout, "timeout", 5*time.Minute, "how long nodes may take for their first state, for the last change, and to come back")
	o.Log.AddFlags(fs)
	// Thousands of nodes have little to say that counts.
	o.Log.Level = "warn"
	fs.Lookup("log-level").DefValue = o.Log.Level
}

// writes tells whether the run makes the changes, in whatever way.
func (o *Options) writes() bool {
	return o.Server == "" && (o.KubeAPIServer == "" || o.KubeAPIServer == Own || o.WriteNamespace != "")
}

// ofSlicecast are the parameters that an API server has no equal of.
var ofSlicecast = []string{"servers", "relays", "grpc-go", "floor"}

// ofChanges are the parameters that say what changes, and how.
var ofChanges = []string{"services", "changing", "seed", "change", "rate", "arrivals", "batch", "grace", "warm-up"}

// tlsFlags are those about TLS with a running server.
const tlsFlags = "--ca-file, --server-name, --node-ca-cert-file, --node-ca-key-file, --client-cert-file, --client-key-file"

// observed is the name of what is played where the run does not make the changes.
const observed = "observed"

// parameters gives those of a scenario that the course of the run follows from.
func (o *Options) parameters(s *scenario.Scenario) map[string]any {
	out := s.Parameters()
	if !o.writes() {
		maps.DeleteFunc(out, func(name string, _ any) bool { return slices.Contains(ofChanges, name) })
	}
	return out
}

// source is where the state is from.
func (o *Options) source() report.Source {
	switch {
	case !o.writes():
		return report.Observed
	case o.KubeAPIServer == Own:
		return report.OwnAPIServer
	case o.WriteNamespace != "":
		return report.Written
	}
	return report.Generated
}

// Validate gives the scenario, or finds all that is wrong.
func (o *Options) Validate() (*scenario.Scenario, error) {
	var errs []error
	wrong := func(is bool, format string, args ...any) {
		if is {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	if _, err := o.Log.NewLogger(io.Discard); err != nil {
		errs = append(errs, err)
	}
	wrong(o.Repeats < 1, "--repeats is %d: use at least 1", o.Repeats)
	wrong(o.Timeout <= 0, "--timeout is %v: use a positive duration", o.Timeout)
	wrong(o.PerWorker < 1, "--nodes-per-process is %d: use at least 1", o.PerWorker)
	wrong(o.WriteNamespace != "" && (o.KubeAPIServer == "" || o.KubeAPIServer == Own),
		"--write-namespace is for the cluster of a kubeconfig: add --kube-apiserver=KUBECONFIG or leave it out")
	if o.KubeAPIServer == Own {
		err := ownAvailable()
		wrong(err != nil, "--kube-apiserver=own: %w", err)
	}
	authority, certificate := o.NodeCACertFile+o.NodeCAKeyFile, o.ClientCertFile+o.ClientKeyFile
	files := o.CAFile != "" && (o.NodeCACertFile != "" && o.NodeCAKeyFile != "" && certificate == "" ||
		o.ClientCertFile != "" && o.ClientKeyFile != "" && authority == "")
	anyFile := o.CAFile+authority+certificate+o.ServerName != ""
	s, err := scenario.Load(o.Scenario, o.flags)
	if err != nil {
		return nil, errors.Join(append(errs, err)...)
	}
	switch {
	case o.Server == "":
		wrong(anyFile || o.InsecurePlaintext || o.ServerPID != 0 && o.Peer == report.Slicecast, "%s, --insecure-plaintext and --server-pid are about a "+
			"running server: add --server", tlsFlags)
	case o.KubeAPIServer != "":
		wrong(true, "--server and --kube-apiserver are both given: use one of them")
	case s.Floor || s.Event != scenario.None && s.Event != scenario.Reconnect || s.Relays > 0 || s.Servers > 1:
		wrong(true, "floor, event, servers and relays are about servers of the run's own: leave --server out")
	case o.InsecurePlaintext:
		wrong(anyFile || s.GRPCGo, "--insecure-plaintext excludes %s and --grpc-go", tlsFlags)
	default:
		wrong(!files, "--server needs --ca-file, and either --node-ca-cert-file and --node-ca-key-file or --client-cert-file and --client-key-file "+
			"(or --insecure-plaintext, if the server has it)")
	}
	if o.Peer == report.KubeAPIServer {
		wrong(o.KubeAPIServer == "", "--kube-apiserver is empty: name a kubeconfig, or own")
		wrong(s.Event == scenario.Restart || s.Event == scenario.Failover, "event is %s, as a flag or the scenario %s says: the API server is not killed, use reconnect or none",
			s.Event, s.Name)
		wrong(s.Servers > 1 || s.Relays > 0 || s.GRPCGo || s.Floor, "%s are about Slicecast's servers, and a flag or the scenario %s has one of them: "+
			"leave it out with an API server, or use another scenario", strings.Join(ofSlicecast, ", "), s.Name)
		wrong(o.KubeAPIServer == Own && o.ServerPID != 0, "--server-pid is about a running API server: name its kubeconfig, or leave it out")
	}
	if !o.writes() {
		var given []string
		for _, name := range append([]string{"scenario"}, ofChanges...) {
			if o.flags.Changed(name) {
				given = append(given, "--"+name)
			}
		}
		wrong(len(given) > 0, "%s: what changes is not this program's to say where it only observes: leave that out, "+
			"or add --write-namespace to the kubeconfig of a cluster", strings.Join(given, ", "))
		s.Name, s.Description = observed, ""
	}
	if o.writes() && s.Change == generate.None && s.Event == scenario.None {
		s.WarmUp = 0
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		errs = append(errs, fmt.Errorf("limit of open files: %w", err))
	}
	connections := uint64(1)
	if s.Floor {
		connections = 2
	}
	open := connections*uint64(min(s.Nodes, o.PerWorker)) + spareFiles
	wrong(open > limit.Max, "a process has %d files open, and it may have %d: use a smaller --nodes-per-process, or raise the limit (ulimit -Hn)",
		open, limit.Max)
	open = connections*uint64(share(s.Nodes, addresses(o, s))) + spareFiles
	wrong(o.Server == "" && o.Peer == report.Slicecast && open > limit.Max,
		"a server has %d files open for its share of %d nodes, and it may have %d: use more relays, or raise the limit (ulimit -Hn)", open, s.Nodes, limit.Max)
	return s, errors.Join(append(errs, limits(o, s))...)
}
