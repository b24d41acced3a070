// Package engine runs a scenario. It starts servers and nodes, lets nodes connect and the state
// change, measures the costs, compares all nodes with the true state, and reports the result.
// Servers and nodes run in child processes, so that the operating system accounts for each
// separately. All of them end with the run.
package engine

import (
	"errors"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/loadtest/generate"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/scenario"
	"github.com/slicecast/slicecast/loadtest/usage"
)

// Hidden commands with which this program starts itself as a server or as a worker.
const (
	ServeCommand = "serve-target"
	WorkCommand  = "work"
)

// Own is the value of --kube-apiserver that makes the run start an API server.
const Own = "own"

// maxPerWorker is the default for the maximum number of nodes in one worker process.
const maxPerWorker = 15_000

// Options say what to run and against which peer. Apart from those with a comment, each field is
// the value of the flag that AddFlags binds to it.
type Options struct {
	// Peer is the system that distributes the state: Slicecast, or an API server that nodes watch.
	Peer report.Peer
	// Scenario is the name or the file of a scenario. Parameters that were set as flags override
	// those of the scenario.
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

// AddFlags adds the flags for the peer, with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.flags = fs
	if o.Peer == "" {
		o.Peer = report.Slicecast
	}
	fs.StringVar(&o.Scenario, "scenario", scenario.Default,
		"what to play: the name of a scenario that comes with the program, or a YAML file; the flags below override its parameters")
	new(scenario.Scenario).AddFlags(fs)
	if o.Peer == report.KubeAPIServer {
		for _, name := range ofSlicecast {
			fs.Lookup(name).Hidden = true
		}
		fs.Lookup("event").Usage = "what happens during the changes: reconnect (all connections are cut), none"
	}
	fs.IntVar(&o.Repeats, "repeats", 1,
		"how often to play the scenario, each time with new servers; the report has the median and the range of each figure")

	api := "kubeconfig of the Kubernetes API server whose state is distributed, or \"own\" to start one with the " +
		"etcd and kube-apiserver that 'make setup' installed in this repository, or of $SLICECAST_BINARIES"
	if o.Peer == report.KubeAPIServer {
		fs.StringVar(&o.KubeAPIServer, "kube-apiserver", Own, api)
		fs.IntVar(&o.ServerPID, "server-pid", 0, "the API server's process on this machine, for its CPU time and memory")
	} else {
		fs.StringVar(&o.KubeAPIServer, "kube-apiserver", "", api+"; by default, the servers generate their state")
		fs.StringVar(&o.Server, "server", "",
			"address (host:port) of a running Slicecast server, whose own changes are observed for --duration; by default, the run starts a server")
		fs.StringVar(&o.CAFile, "ca-file", "", "with --server: PEM file of CA certificates that verify the server's certificate")
		fs.StringVar(&o.ServerName, "server-name", "",
			"with --server: name that the server's certificate must have; by default, the host of --server")
		fs.StringVar(&o.NodeCACertFile, "node-ca-cert-file", "",
			"with --server: PEM file of the certificate of a CA in the server's --client-ca-file, which issues the nodes' certificates")
		fs.StringVar(&o.NodeCAKeyFile, "node-ca-key-file", "", "PEM file of the key for --node-ca-cert-file")
		fs.StringVar(&o.ClientCertFile, "client-cert-file", "", "with --server, instead of --node-ca-cert-file: PEM file of a client certificate "+
			"that may act as any node (organization system:masters); all nodes use it")
		fs.StringVar(&o.ClientKeyFile, "client-key-file", "", "PEM file of the key for --client-cert-file")
		fs.BoolVar(&o.InsecurePlaintext, "insecure-plaintext", false, "with --server: connect without TLS")
		fs.IntVar(&o.ServerPID, "server-pid", 0, "with --server: the server's process on this machine, for its CPU time and memory")
	}
	fs.StringVar(&o.WriteNamespace, "write-namespace", "", "with the kubeconfig of a cluster: a namespace to create for the scenario's Services and "+
		"EndpointSlices, and to remove at the end. They have a service-proxy-name, so the cluster's own nodes "+
		"program nothing for them, but kube-proxies and "+
		"Slicecast's servers receive all the slices. Without this flag nothing is written, and the cluster's own changes are observed for --duration")

	fs.IntVar(&o.PerWorker, "nodes-per-process", maxPerWorker, "maximum number of nodes that one process simulates")
	fs.DurationVar(&o.Timeout, "timeout", 5*time.Minute, "how long nodes may take to receive their first state, to "+
		"receive the last change, and to come back after an event")
	o.Log.AddFlags(fs)
	// With thousands of nodes, info messages would drown the important ones.
	o.Log.Level = "warn"
	fs.Lookup("log-level").DefValue = o.Log.Level
}

// writes reports whether the run makes the changes itself.
func (o *Options) writes() bool {
	return o.Server == "" && (o.KubeAPIServer == "" || o.KubeAPIServer == Own || o.WriteNamespace != "")
}

// ofSlicecast lists the parameters that have no meaning for an API server.
var ofSlicecast = []string{"servers", "relays", "grpc-go", "floor"}

// ofChanges lists the parameters that determine the changes.
var ofChanges = []string{"services", "changing", "seed", "change", "rate", "arrivals", "batch", "grace", "warm-up"}

// tlsFlags names the flags for TLS with a running server.
const tlsFlags = "--ca-file, --server-name, --node-ca-cert-file, --node-ca-key-file, --client-cert-file, --client-key-file"

// observed is the name of the scenario if the run does not make the changes.
const observed = "observed"

// parameters returns the parameters of a scenario that affect the run.
func (o *Options) parameters(s *scenario.Scenario) map[string]any {
	out := s.Parameters()
	if !o.writes() {
		maps.DeleteFunc(out, func(name string, _ any) bool { return slices.Contains(ofChanges, name) })
	}
	return out
}

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

// Validate returns the scenario, and all errors in the options.
func (o *Options) Validate() (*scenario.Scenario, error) {
	var wrong scenario.Mistakes
	if _, err := o.Log.NewLogger(io.Discard); err != nil {
		wrong = append(wrong, err)
	}
	wrong.When(o.Repeats < 1, "--repeats is %d: use at least 1", o.Repeats)
	wrong.When(o.Timeout <= 0, "--timeout is %v: use a positive duration", o.Timeout)
	wrong.When(o.PerWorker < 1, "--nodes-per-process is %d: use at least 1", o.PerWorker)
	wrong.When(o.WriteNamespace != "" && (o.KubeAPIServer == "" || o.KubeAPIServer == Own),
		"--write-namespace is for the cluster of a kubeconfig: add --kube-apiserver=KUBECONFIG or leave it out")
	if o.KubeAPIServer == Own {
		err := ownAvailable()
		wrong.When(err != nil, "--kube-apiserver=own: %w", err)
	}
	s, err := scenario.Load(o.Scenario, o.flags)
	if err != nil {
		return nil, errors.Join(append(wrong, err)...)
	}
	o.validateServer(s, &wrong)
	if o.Peer == report.KubeAPIServer {
		o.validateAPIServer(s, &wrong)
	}
	if !o.writes() {
		o.validateObserving(&wrong)
		s.Name, s.Description = observed, ""
	} else if s.Change == generate.None && s.Event == scenario.None {
		s.WarmUp = 0
	}
	machine, err := usage.ThisMachine()
	if err == nil {
		err = limits(o, s, machine)
	}
	return s, errors.Join(append(wrong, err)...)
}

func (o *Options) validateServer(s *scenario.Scenario, wrong *scenario.Mistakes) {
	authority, certificate := o.NodeCACertFile+o.NodeCAKeyFile, o.ClientCertFile+o.ClientKeyFile
	files := o.CAFile != "" && (o.NodeCACertFile != "" && o.NodeCAKeyFile != "" && certificate == "" ||
		o.ClientCertFile != "" && o.ClientKeyFile != "" && authority == "")
	anyFile := o.CAFile+authority+certificate+o.ServerName != ""
	switch {
	case o.Server == "":
		wrong.When(anyFile || o.InsecurePlaintext || o.ServerPID != 0 && o.Peer == report.Slicecast,
			"%s, --insecure-plaintext and --server-pid require a running server: add --server", tlsFlags)
	case o.KubeAPIServer != "":
		wrong.When(true, "--server and --kube-apiserver are both given: use one of them")
	case s.Floor || s.Event != scenario.None && s.Event != scenario.Reconnect || s.Relays > 0 || s.Servers > 1:
		wrong.When(true, "floor, event, servers and relays require servers that the run starts: leave --server out")
	case o.InsecurePlaintext:
		wrong.When(anyFile || s.GRPCGo, "--insecure-plaintext excludes %s and --grpc-go", tlsFlags)
	default:
		wrong.When(!files, "--server needs --ca-file, and either --node-ca-cert-file and --node-ca-key-file or "+
			"--client-cert-file and --client-key-file "+
			"(or --insecure-plaintext, if the server serves without TLS)")
	}
}

func (o *Options) validateAPIServer(s *scenario.Scenario, wrong *scenario.Mistakes) {
	wrong.When(o.KubeAPIServer == "", "--kube-apiserver is empty: use a kubeconfig or own")
	wrong.When(s.Event == scenario.Restart || s.Event == scenario.Failover, "event is %s, from a flag or the "+
		"scenario %s: an API server cannot be killed, use reconnect or none",
		s.Event, s.Name)
	wrong.When(s.Servers > 1 || s.Relays > 0 || s.GRPCGo || s.Floor,
		"%s require Slicecast's servers, but a flag or the scenario %s sets one of them: "+
			"leave it out with an API server, or use another scenario", strings.Join(ofSlicecast, ", "), s.Name)
	wrong.When(o.KubeAPIServer == Own && o.ServerPID != 0, "--server-pid requires a running API server: add its "+
		"kubeconfig as --kube-apiserver, or leave it out")
}

func (o *Options) validateObserving(wrong *scenario.Mistakes) {
	var given []string
	for _, name := range append([]string{"scenario"}, ofChanges...) {
		if o.flags.Changed(name) {
			given = append(given, "--"+name)
		}
	}
	wrong.When(len(given) > 0, "%s: this run only observes and cannot choose the changes: leave these flags out, "+
		"or use --write-namespace with the kubeconfig of a cluster", strings.Join(given, ", "))
}
