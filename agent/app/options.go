// Package app implements the slicecast-agent command: its flags, and the agent that they configure.
package app

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/slicecast/slicecast/agent/client/flags"
	"github.com/slicecast/slicecast/agent/pages"
	"github.com/slicecast/slicecast/agent/programmer/iptables"
	"github.com/slicecast/slicecast/internal/auth"
	"github.com/slicecast/slicecast/internal/configfile"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
)

// Options are the agent's flags. The zero value is not usable, because AddFlags sets the defaults.
type Options struct {
	MigrateFile string
	InitOnly    bool

	NodeName string

	// Servers or ServerService is where the agent gets its state from. If both are empty, the agent
	// is standalone and reads Source.
	Servers       []string
	ServerService string
	CAConfigMap   string
	Source        string
	Kubeconfig    string
	Manifests     string
	ProxyName     string
	Checkpoint    string

	BesideKubeProxy bool

	Credentials flags.Options

	Programmer         string
	ProgrammerFallback bool
	IPTablesVariant    string
	IPVS               IPVSOptions
	Node               NodeOptions

	StatusSocket         string
	HealthzAddresses     []string
	MetricsAddresses     []string
	Pages                []string
	Profiling            bool
	SecureMetricsAddress string
	MetricsCertFile      string
	MetricsTokenAudience string
	MetricsAccounts      []string
	MetricsKeyFile       string
	MetricsClientCAFile  string

	Log daemon.LogOptions

	// Registry is not a flag; nil means a new registry.
	Registry daemon.Registry

	// iptablesMetrics are for a programmer for iptables; nil means that nobody wants them.
	iptablesMetrics *iptables.Metrics
	// flags are the flags that AddFlags has added.
	flags *pflag.FlagSet
	file  configfile.File
}

// AddFlags adds the flags, with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.flags = fs
	o.file.AddFlag(fs)
	fs.StringVar(&o.MigrateFile, "migrate-config", "",
		"Path to the configuration file of kube-proxy, or - for standard input. The agent converts it to a file for "+
			"--config on standard output, reports what cannot be carried over, and exits.")
	fs.BoolVar(&o.InitOnly, "init-only", false,
		"Set the kernel parameters that the other flags require (connection tracking, NodePorts on loopback "+
			"addresses, IPVS), which needs a privileged container, and exit.")
	fs.StringVar(&o.NodeName, "node-name", os.Getenv("NODE_NAME"),
		"Name of this machine's Node. If empty, it is $NODE_NAME, or else the host name in lower case.")
	o.addFeedFlags(fs)
	o.Credentials.AddFlags(fs, "")
	fs.StringVar(&o.Programmer, "programmer", programmerAuto,
		"How the kernel is programmed: nftables, iptables, ipvs, auto (nftables if the kernel supports it, or else "+
			"iptables), shadow (program nothing, and compare what the kernel does with what it should), or "+
			"printer (only print). The rules of an earlier programmer are removed once the new ones are complete.")
	fs.BoolVar(&o.ProgrammerFallback, "programmer-fallback", true,
		"Use the next one of ipvs, nftables and iptables if the kernel lacks what --programmer requires. The reason "+
			"is in the log, the metrics and the status. If false, that is an error.")
	fs.StringVar(&o.IPTablesVariant, "iptables-variant", "auto",
		"Variant of the iptables commands: auto (that of the command iptables), nft or legacy.")
	o.IPVS.addFlags(fs)
	o.Node.addFlags(fs)
	o.addListenerFlags(fs)
	o.Log.AddFlags(fs)
}

func (o *Options) addFeedFlags(fs *pflag.FlagSet) {
	fs.StringSliceVar(&o.Servers, "servers", nil,
		"Comma-separated addresses (host:port) of slicecast-servers to connect to first. They name the other "+
			"servers. A host name stands for all of its addresses in DNS. Without this flag and --server-service, "+
			"the agent is standalone.")
	fs.StringVar(&o.ServerService, "server-service", "",
		"Service (namespace/name) of the slicecast-servers. Its endpoints are looked up through the Kubernetes API; "+
			"its cluster IP is not used.")
	fs.StringVar(&o.CAConfigMap, "ca-config-map", "",
		"ConfigMap (namespace/name) that the servers write --ca-file's content to, with the key ca.crt. It is read "+
			"with each lookup of --server-service for as long as there has been no such file, which a kubelet may mount "+
			"a minute later.")
	fs.StringVar(&o.Source, "source", "", "Where a standalone agent gets its state from: kube or file.")
	fs.StringVar(&o.Kubeconfig, "kubeconfig", "",
		"Path to the kubeconfig file for --server-service, --source=kube and --metrics-token-audience. If empty, the "+
			"in-cluster configuration is used.")
	fs.StringVar(&o.Manifests, "manifests", "", "Path to the directory of manifests for --source=file.")
	fs.StringVar(&o.ProxyName, "service-proxy-name", "",
		"Value of the label service.kubernetes.io/service-proxy-name of the Services that a standalone agent serves. "+
			"If empty, it serves the Services without the label.")
	fs.BoolVar(&o.BesideKubeProxy, "beside-kube-proxy", false,
		"kube-proxy is meant to run on this node and serves other Services. Otherwise the agent warns of a kube-proxy "+
			"in its log, metrics and status. It is implied by --service-proxy-name.")
	fs.StringVar(&o.Checkpoint, "checkpoint", "",
		"Path of the file that keeps the state from the servers. With it, a restarted agent receives only what has "+
			"changed, and an agent that reaches no server programs the last known state. If empty, nothing is kept.")
}

func (o *Options) addListenerFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.StatusSocket, "status-socket", "",
		"Path of a Unix socket for the status command and grpcurl. Only the agent's own user can open it. "+
			"If empty, there is no such socket.")
	fs.StringSliceVar(&o.HealthzAddresses, "healthz-bind-address", nil,
		"Comma-separated addresses (host:port) to serve /healthz, /livez and /readyz on, over HTTP without "+
			"authentication. An address that is in use is tried again. If empty, they are not served. Load balancers "+
			"may check kube-proxy's address, 0.0.0.0:10256.")
	fs.StringSliceVar(&o.MetricsAddresses, "metrics-bind-address", []string{"127.0.0.1:10249"},
		"Comma-separated loopback addresses (host:port) to serve kube-proxy's pages on, over HTTP without "+
			"authentication. An address that is in use is tried again. If empty, they are not served; with "+
			"--beside-kube-proxy or --service-proxy-name, that is the default.")
	fs.StringSliceVar(&o.Pages, "pages", pages.Names,
		"Comma-separated list of the pages that --metrics-bind-address has: "+strings.Join(pages.Names, ", ")+".")
	fs.BoolVar(&o.Profiling, "profiling", false, "Serve /debug/pprof on --metrics-bind-address, too.")
	fs.StringVar(&o.SecureMetricsAddress, "secure-metrics-bind-address", "",
		"Address (host:port) to serve /metrics on, over TLS to observers: see --metrics-client-ca-file and "+
			"--metrics-token-audience. If empty, they are not served over TLS.")
	fs.StringVar(&o.MetricsCertFile, "metrics-cert-file", "",
		"Path to the PEM file with the certificate for --secure-metrics-bind-address. The file is reloaded when it "+
			"changes. If empty, the agent makes a certificate, which clients cannot verify.")
	fs.StringVar(&o.MetricsKeyFile, "metrics-key-file", "",
		"Path to the PEM file with the private key of --metrics-cert-file. The file is reloaded when it changes.")
	fs.StringVar(&o.MetricsClientCAFile, "metrics-client-ca-file", "",
		"Path to the PEM file with the CA certificates that the client certificates for /metrics are verified "+
			"against: those of observers (slicecast:observers) and operators (system:masters). The file is reloaded when "+
			"it changes.")
	fs.StringVar(&o.MetricsTokenAudience, "metrics-token-audience", "",
		"Audience of the tokens of --metrics-service-accounts that --secure-metrics-bind-address accepts. If empty, no "+
			"tokens are accepted.")
	fs.StringSliceVar(&o.MetricsAccounts, "metrics-service-accounts", nil,
		"Comma-separated ServiceAccounts (namespace/name) that may read /metrics with a token for "+
			"--metrics-token-audience, such as that of Prometheus.")
}

// complete sets what depends on the machine.
func (o *Options) complete() error {
	if o.NodeName == "" {
		name, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("--node-name is not set, and the host name cannot be read: %w", err)
		}
		o.NodeName = strings.ToLower(name)
	}
	if o.Programmer == programmerShadow {
		// The ports belong to whatever programs the kernel.
		o.HealthzAddresses = withoutPort(o.HealthzAddresses, kubeProxyHealthzPort)
		o.MetricsAddresses = withoutPort(o.MetricsAddresses, kubeProxyMetricsPort)
	}
	if o.kubeProxyExpected() && !o.given("metrics-bind-address") {
		o.MetricsAddresses = nil // the default is kube-proxy's
	}
	return nil
}

// These are kube-proxy's ports.
const kubeProxyHealthzPort, kubeProxyMetricsPort = "10256", "10249"

// withoutPort returns the addresses that have another port.
func withoutPort(addresses []string, port string) []string {
	return slices.DeleteFunc(slices.Clone(addresses), func(a string) bool {
		_, p, err := net.SplitHostPort(a)
		return err == nil && p == port
	})
}

// kubeProxyExpected reports whether a kube-proxy is meant to run on the node, too.
func (o *Options) kubeProxyExpected() bool { return o.BesideKubeProxy || o.ProxyName != "" }

// given reports whether a flag is on the command line or its field in the configuration file.
func (o *Options) given(flag string) bool { return o.flags.Changed(flag) || o.file.Sets(flag) }

// validate returns an error that names the flags that are wrong, and says what to do.
func (o *Options) validate() error {
	return errors.Join(o.validateFeed(), o.validateCredentials(), o.validateProgrammer(),
		validateAddresses("--healthz-bind-address", o.HealthzAddresses, true), o.validateMetrics())
}

func (o *Options) standalone() bool { return len(o.Servers) == 0 && o.ServerService == "" }

func (o *Options) validateFeed() error {
	_, isService := model.ParseServiceKey(o.ServerService)
	_, isConfigMap := model.ParseServiceKey(o.CAConfigMap) // ConfigMaps are named in the same way
	switch {
	case len(o.Servers) > 0 && o.ServerService != "":
		return errors.New("--servers and --server-service exclude each other: remove one of them")
	case !o.standalone() && (o.Source != "" || o.Manifests != "" || o.ProxyName != ""):
		return errors.New("--source, --manifests and --service-proxy-name are for an agent without servers: remove " +
			"them, or remove --servers and --server-service")
	case o.standalone() && o.Checkpoint != "":
		return errors.New("--checkpoint requires --servers or --server-service: set one of them, or remove " +
			"--checkpoint")
	case o.Kubeconfig != "" && o.ServerService == "" && o.Source != "kube" && o.MetricsTokenAudience == "":
		return errors.New("--kubeconfig requires --server-service, --source=kube or --metrics-token-audience: set one " +
			"of them, or remove --kubeconfig")
	case o.ServerService != "" && !isService:
		return fmt.Errorf("--server-service is %q: use namespace/name", o.ServerService)
	case o.CAConfigMap != "" && !isConfigMap:
		return fmt.Errorf("--ca-config-map is %q: use namespace/name", o.CAConfigMap)
	case o.CAConfigMap != "" && (o.ServerService == "" || o.Credentials.CAFile == ""):
		return errors.New("--ca-config-map requires --server-service and --ca-file: set them, or remove --ca-config-map")
	case !o.standalone():
		return validateAddresses("--servers", o.Servers, false)
	case o.Source == "":
		return errors.New("no source of Services: set --servers or --server-service, or set --source to run without " +
			"a server")
	case o.Source != "kube" && o.Source != "file":
		return fmt.Errorf("--source is %q: use kube or file", o.Source)
	case (o.Source == "file") != (o.Manifests != ""):
		return errors.New("--source=file and --manifests must be set together")
	}
	return source.ValidateProxyName(o.ProxyName)
}

// validateAddresses returns an error if a flag's addresses are not host:port. The host may be empty
// in addresses to listen on.
func validateAddresses(flag string, addresses []string, listen bool) error {
	for _, a := range addresses {
		if host, port, err := net.SplitHostPort(a); err != nil || host == "" && !listen || port == "" {
			return fmt.Errorf("%s contains %q: use host:port", flag, a)
		}
	}
	return nil
}

func (o *Options) validateCredentials() error {
	switch {
	case !o.standalone():
		return o.Credentials.Validate()
	case o.Credentials.IsSet():
		return errors.New("--ca-file, --server-name, --token-file, --client-cert-file, --client-key-file and " +
			"--insecure-plaintext require --servers or --server-service: set one of them, or remove these flags")
	}
	return nil
}

func (o *Options) validateProgrammer() error {
	if candidates[o.Programmer] == nil {
		return fmt.Errorf("--programmer is %q: use auto, nftables, iptables, ipvs, shadow or printer", o.Programmer)
	}
	if _, ok := iptablesVariants[o.IPTablesVariant]; !ok {
		return fmt.Errorf("--iptables-variant is %q: use auto, nft or legacy", o.IPTablesVariant)
	}
	return errors.Join(o.IPVS.validate(), o.Node.validate())
}

func (o *Options) validateMetrics() error {
	for _, a := range o.MetricsAddresses {
		if err := pages.ValidateAddress(a); err != nil {
			return fmt.Errorf("--metrics-bind-address: %w: use a loopback address and a port, such as 127.0.0.1:10249, or "+
				"--secure-metrics-bind-address", err)
		}
	}
	for _, page := range o.Pages {
		if !slices.Contains(pages.Names, page) {
			return fmt.Errorf("--pages contains %q: use %s", page, strings.Join(pages.Names, ", "))
		}
	}
	if _, err := auth.ParseServiceAccounts("--metrics-service-accounts", o.MetricsAccounts); err != nil {
		return err
	}
	if o.SecureMetricsAddress != "" {
		if err := validateAddresses("--secure-metrics-bind-address", []string{o.SecureMetricsAddress}, true); err != nil {
			return err
		}
	}
	clients := o.MetricsClientCAFile != "" || o.MetricsTokenAudience != ""
	switch {
	case (o.MetricsTokenAudience == "") != (len(o.MetricsAccounts) == 0):
		return errors.New("--metrics-token-audience and --metrics-service-accounts must be set together")
	case (o.MetricsCertFile == "") != (o.MetricsKeyFile == ""):
		return errors.New("--metrics-cert-file and --metrics-key-file must be set together")
	case o.SecureMetricsAddress == "" && (clients || o.MetricsCertFile != ""):
		return errors.New("--metrics-cert-file, --metrics-key-file, --metrics-client-ca-file and " +
			"--metrics-token-audience require --secure-metrics-bind-address: set it, or remove these flags")
	case o.SecureMetricsAddress != "" && !clients:
		return errors.New("--secure-metrics-bind-address requires --metrics-client-ca-file or " +
			"--metrics-token-audience: set at least one of them")
	case o.MetricsCertFile == "" && o.MetricsClientCAFile != "":
		return errors.New("--metrics-client-ca-file requires --metrics-cert-file and --metrics-key-file: set them, or " +
			"use --metrics-token-audience")
	}
	return nil
}
