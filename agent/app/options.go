// Package app is the agent as a command. It defines the flags, and connects feed, cache, view and
// programmer.
package app

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
)

// Options are the agent's flags. The zero value is not usable, because AddFlags sets the defaults.
type Options struct {
	ConfigFile  string
	MigrateFile string
	InitOnly    bool

	NodeName string

	// Servers or ServerService is where the agent gets its state from. If both are empty, the agent is
	// standalone and reads Source.
	Servers       []string
	ServerService string
	Source        string
	Kubeconfig    string
	Manifests     string
	ProxyName     string
	Checkpoint    string

	CAFile            string
	ServerName        string
	TokenFile         string
	ClientCertFile    string
	ClientKeyFile     string
	InsecurePlaintext bool

	Programmer         string
	ProgrammerFallback bool
	IPTablesVariant    string
	IPVS               IPVSOptions
	Node               NodeOptions

	StatusSocket        string
	HealthzAddresses    []string
	MetricsBindAddress  string
	MetricsCertFile     string
	MetricsKeyFile      string
	MetricsClientCAFile string

	Log daemon.LogOptions

	// Registry is not a flag; nil means a new registry.
	Registry daemon.Registry

	// fields maps the flags whose values come from ConfigFile to the names of their fields.
	fields map[string]string
}

// AddFlags adds the flags, with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.ConfigFile, "config", "",
		"file with settings, see docs/configuration.md; flags that are given win over it. It is read once, at the start")
	fs.StringVar(&o.MigrateFile, "migrate-config", "",
		"kube-proxy's configuration file (- for standard input), to make one for --config of: it is written to standard output, what could not be carried over is named, and that is all")
	fs.BoolVar(&o.InitOnly, "init-only", false,
		"make the settings of the kernel that are asked for (connection tracking, NodePorts on loopback addresses, IPVS), which takes a privileged container, and end")
	fs.StringVar(&o.NodeName, "node-name", os.Getenv("NODE_NAME"),
		"name of this machine's Node; the default is $NODE_NAME, else the host name in lower case")

	fs.StringSliceVar(&o.Servers, "servers", nil,
		"where to find the first slicecast-server, which names the others: host:port, several with commas; a host name stands for all addresses it has in DNS. "+
			"Without this and --server-service the agent is standalone")
	fs.StringVar(&o.ServerService, "server-service", "",
		"namespace/name of the slicecast-server's Service, whose endpoints are looked up through the Kubernetes API; its virtual IP is not used")
	fs.StringVar(&o.Source, "source", "", "standalone: where state comes from, kube or file")
	fs.StringVar(&o.Kubeconfig, "kubeconfig", "", "kubeconfig for --server-service and --source=kube; the default is the pod's ServiceAccount")
	fs.StringVar(&o.Manifests, "manifests", "", "directory of Kubernetes manifests for --source=file")
	fs.StringVar(&o.ProxyName, "service-proxy-name", "",
		"standalone: serve only Services whose label service.kubernetes.io/service-proxy-name has this value; the default is those without the label")

	fs.StringVar(&o.Checkpoint, "checkpoint", "",
		"file that keeps what the servers have sent, so that a restart costs only what has changed, and an agent without servers programs what it knew; none by default")

	fs.StringVar(&o.CAFile, "ca-file", "", "CA certificates (PEM) that the server's certificate is checked against; followed when it changes")
	fs.StringVar(&o.ServerName, "server-name", "", "name that the certificate of every server must have; the default is the host of its address, and for a server that another one names that one's")
	fs.StringVar(&o.TokenFile, "token-file", "", "ServiceAccount token to show to the server; read again for each stream")
	fs.StringVar(&o.ClientCertFile, "client-cert-file", "", "client certificate (PEM) to show to the server; followed when it changes")
	fs.StringVar(&o.ClientKeyFile, "client-key-file", "", "private key (PEM) of --client-cert-file")
	fs.BoolVar(&o.InsecurePlaintext, "insecure-plaintext", false, "talk to the server without TLS: anyone on the path can read and redirect traffic")

	fs.StringVar(&o.Programmer, "programmer", programmerAuto,
		"what to program: nftables, iptables or ipvs; auto, which is nftables where the kernel has it and else iptables; or printer, which only prints. "+
			"What another one has left on the node is removed when all is programmed")
	fs.BoolVar(&o.ProgrammerFallback, "programmer-fallback", true,
		"where the kernel lacks what --programmer needs, use the next one of ipvs, nftables, iptables; the log, metrics and status say why. If false, that is an error")
	fs.StringVar(&o.IPTablesVariant, "iptables-variant", "auto", "iptables commands to use: auto (what iptables is on this machine), nft or legacy")
	o.IPVS.addFlags(fs)
	o.Node.addFlags(fs)

	fs.StringVar(&o.StatusSocket, "status-socket", "",
		"path of a unix socket for this user only, for the status command and grpcurl; none by default")
	fs.StringSliceVar(&o.HealthzAddresses, "healthz-bind-address", nil,
		"addresses for /healthz, /livez and /readyz over plain HTTP, open to all; one that is taken is tried again. None by default; kube-proxy has 0.0.0.0:10256, which load balancers may ask")
	fs.StringVar(&o.MetricsBindAddress, "metrics-bind-address", "", "address for /metrics over TLS, for clients with a certificate; none by default")
	fs.StringVar(&o.MetricsCertFile, "metrics-cert-file", "", "certificate (PEM) for --metrics-bind-address; followed when it changes")
	fs.StringVar(&o.MetricsKeyFile, "metrics-key-file", "", "private key (PEM) of --metrics-cert-file")
	fs.StringVar(&o.MetricsClientCAFile, "metrics-client-ca-file", "", "CA certificates (PEM) that clients of /metrics must have theirs from; followed when it changes")
	o.Log.AddFlags(fs)
}

// complete sets what depends on the machine.
func (o *Options) complete() error {
	if o.NodeName == "" {
		name, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("no --node-name, and the machine's name can't be read: %w", err)
		}
		o.NodeName = strings.ToLower(name)
	}
	return nil
}

// validate returns an error that names the flags that are wrong, and says what to do.
func (o *Options) validate() error {
	return errors.Join(o.validateFeed(), o.validateCredentials(), o.validateProgrammer(), o.validateHealthz(), o.validateMetrics())
}

func (o *Options) standalone() bool { return len(o.Servers) == 0 && o.ServerService == "" }

func (o *Options) validateFeed() error {
	_, isService := model.ParseServiceKey(o.ServerService)
	switch {
	case len(o.Servers) > 0 && o.ServerService != "":
		return errors.New("--servers and --server-service are both given: use one of them")
	case !o.standalone() && (o.Source != "" || o.Manifests != "" || o.ProxyName != ""):
		return errors.New("--source, --manifests and --service-proxy-name are for an agent without servers: leave them out, or --servers and --server-service")
	case o.standalone() && o.Checkpoint != "":
		return errors.New("--checkpoint is for an agent with servers: leave it out, or give --servers or --server-service")
	case o.Kubeconfig != "" && o.ServerService == "" && o.Source != "kube":
		return errors.New("--kubeconfig is for --server-service and --source=kube: leave it out")
	case o.ServerService != "" && !isService:
		return fmt.Errorf("--server-service is %q: give namespace/name", o.ServerService)
	case !o.standalone():
		return o.validateServers()
	case o.Source == "":
		return errors.New("nothing to follow: give --servers or --server-service, or --source=kube or --source=file to run standalone")
	case o.Source != "kube" && o.Source != "file":
		return fmt.Errorf("--source is %q: use kube or file", o.Source)
	case (o.Source == "file") != (o.Manifests != ""):
		return errors.New("--source=file and --manifests go together")
	}
	return source.ValidateProxyName(o.ProxyName)
}

func (o *Options) validateServers() error {
	for _, s := range o.Servers {
		if host, port, err := net.SplitHostPort(s); err != nil || host == "" || port == "" {
			return fmt.Errorf("--servers has %q: give host:port", s)
		}
	}
	return nil
}

func (o *Options) validateCredentials() error {
	tls := o.CAFile != "" || o.ServerName != "" || o.TokenFile != "" || o.ClientCertFile != "" || o.ClientKeyFile != ""
	switch {
	case o.standalone() && (tls || o.InsecurePlaintext):
		return errors.New("--ca-file, --server-name, --token-file, --client-cert-file, --client-key-file and --insecure-plaintext are about servers: give --servers or --server-service too")
	case o.standalone():
		return nil
	case o.InsecurePlaintext && tls:
		return errors.New("--insecure-plaintext excludes --ca-file, --server-name, --token-file, --client-cert-file and --client-key-file")
	case o.InsecurePlaintext:
		return nil
	case o.CAFile == "":
		return errors.New("--ca-file is missing: give the CA of the server's certificate (or --insecure-plaintext on a machine of your own)")
	case (o.ClientCertFile == "") != (o.ClientKeyFile == ""):
		return errors.New("--client-cert-file and --client-key-file go together")
	case o.ClientCertFile == "" && o.TokenFile == "":
		return errors.New("the server must know who this is: give --token-file, or --client-cert-file and --client-key-file")
	}
	return nil
}

func (o *Options) validateProgrammer() error {
	if candidates[o.Programmer] == nil {
		return fmt.Errorf("--programmer is %q: use auto, nftables, iptables, ipvs or printer", o.Programmer)
	}
	if _, ok := iptablesVariants[o.IPTablesVariant]; !ok {
		return fmt.Errorf("--iptables-variant is %q: use auto, nft or legacy", o.IPTablesVariant)
	}
	return errors.Join(o.IPVS.validate(), o.Node.validate())
}

func (o *Options) validateHealthz() error {
	for _, a := range o.HealthzAddresses {
		if _, port, err := net.SplitHostPort(a); err != nil || port == "" {
			return fmt.Errorf("--healthz-bind-address has %q: give host:port", a)
		}
	}
	return nil
}

func (o *Options) validateMetrics() error {
	files := []string{o.MetricsCertFile, o.MetricsKeyFile, o.MetricsClientCAFile}
	given := len(files) - len(slices.DeleteFunc(slices.Clone(files), func(s string) bool { return s != "" }))
	if o.MetricsBindAddress != "" && given < len(files) || o.MetricsBindAddress == "" && given > 0 {
		return errors.New("--metrics-bind-address, --metrics-cert-file, --metrics-key-file and --metrics-client-ca-file go together")
	}
	return nil
}
