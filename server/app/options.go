package app

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/source/file"
	"github.com/slicecast/slicecast/internal/source/kube"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/tlsfiles"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/auth"
	"github.com/slicecast/slicecast/server/fanout"
)

// These are the values of --source.
const (
	sourceKube = "kube"
	sourceFile = "file"
	// sourceUpstream makes the server a relay.
	sourceUpstream = "upstream"
)

const (
	defaultBindAddress = ":8472"
	// rootAudience and relayAudience are the defaults of --token-audience. They differ, so that a
	// relay cannot present its agents' tokens to the servers that feed it.
	rootAudience  = "slicecast"
	relayAudience = "slicecast-relay"
	// defaultGracePeriod leaves time to end for streams that are drained late in the window, and
	// for other calls.
	defaultGracePeriod = 2 * fanout.DefaultDrainWindow
)

// Options has the values of the command line's flags.
type Options struct {
	Source           string
	Kubeconfig       string
	Manifests        string
	ServiceProxyName string
	Upstream         UpstreamOptions

	AdvertiseServers []string
	ServerService    string

	BindAddress          string
	TLSCertFile          string
	TLSPrivateKeyFile    string
	ClientCAFile         string
	TokenAudience        string
	AgentServiceAccounts []string
	RelayServiceAccounts []string
	InsecurePlaintext    bool
	DebugSocket          string
	HealthzBindAddress   string
	MetricsBindAddress   string

	Shards              uint32
	Tombstones          int
	HeartbeatInterval   time.Duration
	DrainWindow         time.Duration
	MaxBehindWait       time.Duration
	MaxColdSyncBytes    int64
	ShutdownGracePeriod time.Duration

	Log daemon.LogOptions

	// Registry is not a flag. nil means a new one.
	Registry daemon.Registry
}

// AddFlags adds the flags with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.addSourceFlags(fs)
	o.addListenerFlags(fs)
	o.addTuningFlags(fs)
	o.Log.AddFlags(fs)
}

func (o *Options) addSourceFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.Source, "source", sourceKube,
		"Where Services and EndpointSlices come from: kube (a Kubernetes API server), file (a directory of "+
			"manifests), or upstream (other slicecast-servers, which makes this server a relay).")
	fs.StringVar(&o.Kubeconfig, "kubeconfig", "",
		"Path to the kubeconfig file for the API server, for --source=kube and for TokenReviews. "+
			"If empty, the in-cluster configuration is used.")
	fs.StringVar(&o.Manifests, "manifests", "",
		"Path to the directory of manifests for --source=file. Changes in the directory take effect at once.")
	fs.StringVar(&o.ServiceProxyName, "service-proxy-name", "",
		"Value of the label service.kubernetes.io/service-proxy-name of the Services to serve. "+
			"If empty, the Services without the label are served.")
	o.Upstream.AddFlags(fs)
	fs.StringSliceVar(&o.AdvertiseServers, "advertise-servers", nil,
		"Comma-separated addresses (host:port) of all servers that agents may connect to, including this one. "+
			"Agents spread over them.")
	fs.StringVar(&o.ServerService, "server-service", "",
		"Service (namespace/name) of the servers. Its ready endpoints are advertised to agents, "+
			"as with --advertise-servers. It must have a cluster IP.")
}

func (o *Options) addListenerFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.BindAddress, "bind-address", defaultBindAddress, "Address (host:port) to serve gRPC on.")
	fs.StringVar(&o.TLSCertFile, "tls-cert-file", "",
		"Path to the PEM file with the server's certificate and its chain. The file is reloaded when it changes.")
	fs.StringVar(&o.TLSPrivateKeyFile, "tls-private-key-file", "",
		"Path to the PEM file with the private key of --tls-cert-file. The file is reloaded when it changes.")
	fs.StringVar(&o.ClientCAFile, "client-ca-file", "",
		"Path to the PEM file with the CA certificates that client certificates are verified against. The "+
			"organization of a certificate says whether the client is a node (as for kubelets), a relay, an observer "+
			"or an operator. The file is reloaded when it changes.")
	fs.StringArrayVar(&o.AgentServiceAccounts, "agent-service-account", nil,
		"ServiceAccount (namespace/name) of agents. A token that is bound to a Pod authenticates the agent of the "+
			"Pod's node. The flag may be repeated.")
	fs.StringArrayVar(&o.RelayServiceAccounts, "relay-service-account", nil,
		"ServiceAccount (namespace/name) of relays, whose tokens authenticate relays of this server. The flag may be "+
			"repeated.")
	fs.StringVar(&o.TokenAudience, "token-audience", "",
		"Audience of the tokens of this server's agents and relays. No server that feeds this one may accept the same "+
			"audience. If empty, it is "+rootAudience+", or "+relayAudience+" with --source=upstream.")
	fs.BoolVar(&o.InsecurePlaintext, "insecure-plaintext", false,
		"Serve gRPC and metrics without TLS and without authentication. Every client is then an operator.")
	fs.StringVar(&o.DebugSocket, "debug-socket", "",
		"Path of a Unix socket on which to serve gRPC to operators on this machine, without TLS. Only the server's "+
			"own user can open it. If empty, there is no such socket.")
	fs.StringVar(&o.HealthzBindAddress, "healthz-bind-address", "",
		"Address (host:port) to serve /healthz, /livez and /readyz on, over HTTP without authentication. "+
			"If empty, they are not served.")
	fs.StringVar(&o.MetricsBindAddress, "metrics-bind-address", "",
		"Address (host:port) to serve /metrics on, over TLS to observers and operators. If empty, metrics are not "+
			"served.")
}

func (o *Options) addTuningFlags(fs *pflag.FlagSet) {
	fs.Uint32Var(&o.Shards, "shards", store.DefaultShards,
		"Number of shards of the state: a power of two, and the same on all servers and relays.")
	fs.IntVar(&o.Tombstones, "tombstones", store.DefaultTombstones,
		"Number of removed objects that each shard remembers. An agent that was away for more removals compares the "+
			"shard's content with the server.")
	fs.DurationVar(&o.HeartbeatInterval, "heartbeat-interval", fanout.DefaultHeartbeat,
		"Interval at which each stream is sent the digests that clients compare their state with.")
	fs.DurationVar(&o.DrainWindow, "drain-window", fanout.DefaultDrainWindow,
		"Period over which agents are asked to move to another server when this server stops.")
	fs.DurationVar(&o.MaxBehindWait, "max-behind-wait", fanout.DefaultMaxBehindWait,
		"Maximum time that an agent which has seen newer state than this server waits for the server to catch up. "+
			"After that, it is served nonetheless.")
	fs.Int64Var(&o.MaxColdSyncBytes, "max-cold-sync-bytes", fanout.DefaultColdBytes,
		"Maximum number of bytes that are in flight to agents that need whole shards. Other such agents wait for "+
			"their turn.")
	fs.DurationVar(&o.ShutdownGracePeriod, "shutdown-grace-period", defaultGracePeriod,
		"Maximum time to wait for calls to end when the server stops. It must be at least --drain-window.")
}

// problems collects errors.
type problems []error

// when adds an error if a condition holds.
func (p *problems) when(holds bool, format string, args ...any) {
	if holds {
		*p = append(*p, fmt.Errorf(format, args...))
	}
}

// validate returns an error for everything that is wrong with the options.
func (o *Options) validate() error {
	var p problems
	p.when(!slices.Contains([]string{sourceKube, sourceFile, sourceUpstream}, o.Source),
		"--source is %q: use kube, file or upstream", o.Source)
	p.when(o.Source == sourceUpstream && o.ServiceProxyName != "",
		"--service-proxy-name has no effect on a relay: set it on the servers that feed the relay, and remove it here")
	p.when(len(o.AdvertiseServers) > 0 && o.ServerService != "",
		"--advertise-servers and --server-service exclude each other: remove one of them")
	for _, s := range o.AdvertiseServers {
		_, _, err := net.SplitHostPort(s)
		p.when(err != nil, "--advertise-servers: %w: use host:port", err)
	}
	p.when(o.Source == sourceFile && o.Manifests == "", "--source=file requires --manifests: set it to a directory")
	p.when(o.Source != sourceFile && o.Manifests != "", "--manifests requires --source=file: set it, or remove "+
		"--manifests")
	p.when(o.Source != sourceKube && o.Kubeconfig != "" && !o.takesTokens(),
		"--kubeconfig requires --source=kube, --agent-service-account or --relay-service-account: set one of them, or "+
			"remove --kubeconfig")
	p.when(o.Source == sourceFile && o.Kubeconfig == "" && o.takesTokens(),
		"--agent-service-account and --relay-service-account require an API server that reviews tokens: set "+
			"--kubeconfig, or use --client-ca-file instead")
	_, serviceErr := o.serverService()
	_, agentsErr := parseServiceAccounts("--agent-service-account", o.AgentServiceAccounts)
	_, relaysErr := parseServiceAccounts("--relay-service-account", o.RelayServiceAccounts)
	p = append(p, o.Upstream.validate(o.Source == sourceUpstream), source.ValidateProxyName(o.ServiceProxyName),
		serviceErr, agentsErr, relaysErr, o.validateTLS(), o.validateTuning())
	return errors.Join(p...)
}

func (o *Options) validateTuning() error {
	var p problems
	p.when(o.MaxBehindWait <= 0, "--max-behind-wait is %v: use a positive duration", o.MaxBehindWait)
	p.when(o.MaxColdSyncBytes <= 0, "--max-cold-sync-bytes is %d: use a positive number", o.MaxColdSyncBytes)
	p.when(o.Shards == 0, "--shards is 0: use a power of two") // the store checks the rest
	p.when(o.Tombstones <= 0, "--tombstones is %d: use a positive number", o.Tombstones)
	p.when(o.HeartbeatInterval < time.Second, "--heartbeat-interval is %v: use at least 1s", o.HeartbeatInterval)
	p.when(o.HeartbeatInterval > 5*time.Minute,
		"--heartbeat-interval is %v: use at most 5m, because clients wait no longer for a heartbeat",
		o.HeartbeatInterval)
	p.when(o.DrainWindow <= 0, "--drain-window is %v: use a positive duration", o.DrainWindow)
	p.when(o.ShutdownGracePeriod < o.DrainWindow,
		"--shutdown-grace-period is %v, less than --drain-window (%v): increase it, so that streams can end as they "+
			"are asked to",
		o.ShutdownGracePeriod, o.DrainWindow)
	return errors.Join(p...)
}

func (o *Options) validateTLS() error {
	set := func(flags map[string]bool) (names []string) {
		for name, is := range flags {
			if is {
				names = append(names, name)
			}
		}
		slices.Sort(names)
		return names
	}
	files := set(map[string]bool{"--tls-cert-file": o.TLSCertFile != "", "--tls-private-key-file": o.TLSPrivateKeyFile != ""})
	clients := set(map[string]bool{
		"--client-ca-file": o.ClientCAFile != "", "--agent-service-account": len(o.AgentServiceAccounts) > 0,
		"--relay-service-account": len(o.RelayServiceAccounts) > 0,
		"--token-audience":        o.TokenAudience != "",
	})
	switch {
	case o.InsecurePlaintext && len(files)+len(clients) > 0:
		return fmt.Errorf("--insecure-plaintext means no TLS and no authentication: remove it, or remove %s",
			strings.Join(append(files, clients...), ", "))
	case o.InsecurePlaintext:
		return nil
	case len(files) == 0:
		return errors.New("no TLS certificate: set --tls-cert-file and --tls-private-key-file, or set " +
			"--insecure-plaintext where nobody else can reach the server")
	case len(files) == 1:
		return errors.New("--tls-cert-file and --tls-private-key-file must be set together")
	case o.ClientCAFile == "" && !o.takesTokens():
		return errors.New("no agent can authenticate: set --client-ca-file to accept client certificates, such as " +
			"those of kubelets, or --agent-service-account to accept ServiceAccount tokens")
	case !o.takesTokens() && o.TokenAudience != "":
		return errors.New("--token-audience requires --agent-service-account or --relay-service-account: set one of " +
			"them, or remove --token-audience")
	}
	return nil
}

// takesTokens reports whether tokens of any ServiceAccount are accepted.
func (o *Options) takesTokens() bool {
	return len(o.AgentServiceAccounts)+len(o.RelayServiceAccounts) > 0
}

// tokenAudience returns --token-audience or its default.
func (o *Options) tokenAudience() string {
	switch {
	case o.TokenAudience != "":
		return o.TokenAudience
	case o.Source == sourceUpstream:
		return relayAudience
	default:
		return rootAudience
	}
}

func parseServiceAccounts(flag string, list []string) (accounts []types.NamespacedName, err error) {
	for _, s := range list {
		key, ok := model.ParseServiceKey(s) // ServiceAccounts are named in the same way
		if !ok || strings.Contains(s, ":") {
			err = errors.Join(err, fmt.Errorf("%s is %q: use namespace/name", flag, s))
		}
		accounts = append(accounts, types.NamespacedName(key))
	}
	return accounts, err
}

// Config validates the options and returns the configuration for them.
func (o *Options) Config(logger *slog.Logger) (Config, error) {
	if err := o.validate(); err != nil {
		return Config{}, err
	}
	c := Config{
		SourceKind:         o.Source,
		BindAddress:        o.BindAddress,
		DebugSocket:        o.DebugSocket,
		HealthzBindAddress: o.HealthzBindAddress,
		MetricsBindAddress: o.MetricsBindAddress,
		Shards:             o.Shards,
		Tombstones:         o.Tombstones,
		HeartbeatInterval:  o.HeartbeatInterval,
		DrainWindow:        o.DrainWindow,
		MaxBehindWait:      o.MaxBehindWait,
		MaxColdSyncBytes:   o.MaxColdSyncBytes,
		GracePeriod:        o.ShutdownGracePeriod,
		Logger:             logger,
		Registry:           o.Registry,
	}
	if c.Registry == nil {
		c.Registry = daemon.NewRegistry()
	}
	if !o.InsecurePlaintext {
		c.TLS = &tlsfiles.Files{Certificate: o.TLSCertFile, PrivateKey: o.TLSPrivateKeyFile, CA: o.ClientCAFile}
	}
	for _, address := range o.AdvertiseServers {
		c.Servers = append(c.Servers, &pb.Server{Address: address})
	}
	var err error
	if c.ServerService, err = o.serverService(); err != nil {
		return Config{}, err
	}
	var api *rest.Config
	if o.Source == sourceKube || o.takesTokens() {
		if api, err = kube.Config(o.Kubeconfig); err != nil {
			return Config{}, fmt.Errorf("--kubeconfig: %w", err)
		}
	}
	if o.Source == sourceUpstream {
		c.Upstream, err = o.Upstream.config(c)
	} else {
		c.Source, err = o.newSource(api, c)
	}
	if err != nil {
		return Config{}, fmt.Errorf("--source=%s: %w", o.Source, err)
	}
	if o.takesTokens() {
		if c.Tokens, err = o.tokens(api); err != nil {
			return Config{}, err
		}
	}
	return c, nil
}

// serverService returns --server-service, and the zero key if it is not set.
func (o *Options) serverService() (model.ServiceKey, error) {
	if o.ServerService == "" {
		return model.ServiceKey{}, nil
	}
	key, ok := model.ParseServiceKey(o.ServerService)
	if !ok {
		return model.ServiceKey{}, fmt.Errorf("--server-service is %q: use namespace/name", o.ServerService)
	}
	return key, nil
}

func (o *Options) newSource(api *rest.Config, c Config) (source.Source, error) {
	if o.Source == sourceFile {
		return file.New(file.Options{
			Directory: o.Manifests, ServiceProxyName: o.ServiceProxyName, Log: c.Logger, Metrics: c.Registry,
		})
	}
	return kube.New(kube.Options{Config: api, ServiceProxyName: o.ServiceProxyName, Log: c.Logger, Metrics: c.Registry})
}

// tokens returns the options for the review of tokens.
func (o *Options) tokens(api *rest.Config) (*auth.TokenOptions, error) {
	api = rest.CopyConfig(api)
	api.QPS = -1 // the reviewer has budgets of its own
	out := &auth.TokenOptions{Audience: o.tokenAudience()}
	var errs [4]error
	out.Review, errs[0] = kube.TokenReviews(api)
	out.Get, errs[1] = kube.Paths(api)
	out.Agents, errs[2] = parseServiceAccounts("--agent-service-account", o.AgentServiceAccounts)
	out.Relays, errs[3] = parseServiceAccounts("--relay-service-account", o.RelayServiceAccounts)
	return out, errors.Join(errs[:]...)
}
