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
	fs.StringVar(&o.Source, "source", sourceKube,
		"where the state comes from: kube (a Kubernetes API server), file (a directory of manifests) or upstream (another "+
			"slicecast-server: this one is its relay)")
	fs.StringVar(&o.Kubeconfig, "kubeconfig", "",
		"path of the kubeconfig for the API server, for the kube source and for token reviews; default: as a pod of the cluster")
	fs.StringVar(&o.Manifests, "manifests", "", "directory of manifests for the file source; changes in it are followed")
	fs.StringVar(&o.ServiceProxyName, "service-proxy-name", "",
		"serve the Services whose label service.kubernetes.io/service-proxy-name has this value; default: those without the label")
	o.Upstream.AddFlags(fs)
	fs.StringSliceVar(&o.AdvertiseServers, "advertise-servers", nil,
		"addresses (host:port) of all servers that agents may connect to, this one included; agents spread over them")
	fs.StringVar(&o.ServerService, "server-service", "",
		"namespace/name of the servers' own Service, whose ready endpoints are told to agents as --advertise-servers would be; it must have a cluster IP")

	fs.StringVar(&o.BindAddress, "bind-address", defaultBindAddress, "address to serve gRPC on")
	fs.StringVar(&o.TLSCertFile, "tls-cert-file", "", "server certificate, with its chain, in PEM; followed when it changes")
	fs.StringVar(&o.TLSPrivateKeyFile, "tls-private-key-file", "", "key of --tls-cert-file, in PEM; followed when it changes")
	fs.StringVar(&o.ClientCAFile, "client-ca-file", "",
		"CA certificates, in PEM, for client certificates: those of kubelets name nodes, other organizations relays, observers and operators; followed when it changes")
	fs.StringArrayVar(&o.AgentServiceAccounts, "agent-service-account", nil,
		"namespace/name of a ServiceAccount whose tokens, bound to a Pod, let the agent on the Pod's node in; may be given several times")
	fs.StringArrayVar(&o.RelayServiceAccounts, "relay-service-account", nil,
		"namespace/name of a ServiceAccount whose tokens let in relays, which serve agents from this server; may be given several times")
	fs.StringVar(&o.TokenAudience, "token-audience", "",
		"audience that the tokens of this server's agents and relays must be for, which no server that feeds it may accept; the default is "+
			rootAudience+", and "+relayAudience+" with --source=upstream")
	fs.BoolVar(&o.InsecurePlaintext, "insecure-plaintext", false,
		"serve without TLS and without asking anybody who they are, also on --metrics-bind-address")
	fs.StringVar(&o.DebugSocket, "debug-socket", "",
		"path of a unix socket for local operators: the same gRPC services, in plaintext, for this user only; default: none")
	fs.StringVar(&o.HealthzBindAddress, "healthz-bind-address", "",
		"address to serve /healthz, /livez and /readyz on, in plain HTTP for anybody; default: none")
	fs.StringVar(&o.MetricsBindAddress, "metrics-bind-address", "",
		"address to serve /metrics on, with TLS for client certificates of slicecast:observers and system:masters; default: none")

	fs.Uint32Var(&o.Shards, "shards", store.DefaultShards, "number of shards of the state, a power of two; the same on all servers and relays")
	fs.IntVar(&o.Tombstones, "tombstones", store.DefaultTombstones,
		"removals that each shard remembers; an agent that comes back after more of them compares the shard's content")
	fs.DurationVar(&o.HeartbeatInterval, "heartbeat-interval", fanout.DefaultHeartbeat, "how often each stream gets digests to compare")
	fs.DurationVar(&o.DrainWindow, "drain-window", fanout.DefaultDrainWindow,
		"time over which agents are asked to move to another server when this one stops")
	fs.DurationVar(&o.MaxBehindWait, "max-behind-wait", fanout.DefaultMaxBehindWait,
		"how long an agent that has seen newer state than this server waits for it to catch up, before it is served nonetheless")
	fs.Int64Var(&o.MaxColdSyncBytes, "max-cold-sync-bytes", fanout.DefaultColdBytes,
		"bytes that may be on their way at a time to agents that need all of the state, or of shards; others of them wait for their turn")
	fs.DurationVar(&o.ShutdownGracePeriod, "shutdown-grace-period", defaultGracePeriod,
		"how long the server waits, when it stops, for calls to end; at least --drain-window")

	o.Log.AddFlags(fs)
}

// validate returns everything that is wrong with the options.
func (o *Options) validate() error {
	var errs []error
	wrong := func(is bool, format string, args ...any) {
		if is {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	wrong(!slices.Contains([]string{sourceKube, sourceFile, sourceUpstream}, o.Source), "--source is %q: use kube, file or upstream", o.Source)
	errs = append(errs, o.Upstream.validate(o.Source == sourceUpstream))
	wrong(o.Source == sourceUpstream && o.ServiceProxyName != "", "--service-proxy-name is for the servers that watch: leave it out on a relay")
	errs = append(errs, source.ValidateProxyName(o.ServiceProxyName))
	wrong(len(o.AdvertiseServers) > 0 && o.ServerService != "", "--advertise-servers and --server-service are both given: use one of them")
	for _, s := range o.AdvertiseServers {
		_, _, err := net.SplitHostPort(s)
		wrong(err != nil, "--advertise-servers: %w: use HOST:PORT", err)
	}
	if _, err := o.serverService(); err != nil {
		errs = append(errs, err)
	}
	wrong(o.MaxBehindWait <= 0, "--max-behind-wait is %v: use a positive duration", o.MaxBehindWait)
	wrong(o.MaxColdSyncBytes <= 0, "--max-cold-sync-bytes is %d: use a positive number", o.MaxColdSyncBytes)
	wrong(o.Source == sourceFile && o.Manifests == "", "--source=file needs a directory: add --manifests=DIRECTORY")
	wrong(o.Source != sourceFile && o.Manifests != "", "--manifests is for the file source: add --source=file or leave it out")
	wrong(o.Source != sourceKube && o.Kubeconfig != "" && !o.takesTokens(),
		"--kubeconfig is for the kube source and for token reviews: add --agent-service-account or leave it out")
	wrong(o.Source == sourceFile && o.Kubeconfig == "" && o.takesTokens(),
		"--agent-service-account and --relay-service-account need an API server to review tokens: add --kubeconfig, or use --client-ca-file instead")
	_, err := parseServiceAccounts("--agent-service-account", o.AgentServiceAccounts)
	errs = append(errs, err)
	_, err = parseServiceAccounts("--relay-service-account", o.RelayServiceAccounts)
	errs = append(errs, err)
	errs = append(errs, o.validateTLS())

	wrong(o.Shards == 0, "--shards is 0: use a power of two") // the store checks the rest
	wrong(o.Tombstones <= 0, "--tombstones is %d: use a positive number", o.Tombstones)
	wrong(o.HeartbeatInterval < time.Second, "--heartbeat-interval is %v: use at least 1s", o.HeartbeatInterval)
	wrong(o.HeartbeatInterval > 5*time.Minute, "--heartbeat-interval is %v: use at most 5m, which is all that clients wait for", o.HeartbeatInterval)
	wrong(o.DrainWindow <= 0, "--drain-window is %v: use a positive duration", o.DrainWindow)
	wrong(o.ShutdownGracePeriod < o.DrainWindow, "--shutdown-grace-period is %v, less than --drain-window, which is %v: "+
		"make it longer, so that streams can end as they are asked to", o.ShutdownGracePeriod, o.DrainWindow)
	return errors.Join(errs...)
}

func (o *Options) validateTLS() error {
	given := func(flags map[string]bool) (names []string) {
		for name, is := range flags {
			if is {
				names = append(names, name)
			}
		}
		slices.Sort(names)
		return names
	}
	files := given(map[string]bool{"--tls-cert-file": o.TLSCertFile != "", "--tls-private-key-file": o.TLSPrivateKeyFile != ""})
	clients := given(map[string]bool{
		"--client-ca-file": o.ClientCAFile != "", "--agent-service-account": len(o.AgentServiceAccounts) > 0,
		"--relay-service-account": len(o.RelayServiceAccounts) > 0,
		"--token-audience":        o.TokenAudience != "",
	})
	switch {
	case o.InsecurePlaintext && len(files)+len(clients) > 0:
		return fmt.Errorf("--insecure-plaintext means no TLS and no authentication: leave out either it or %s",
			strings.Join(append(files, clients...), ", "))
	case o.InsecurePlaintext:
		return nil
	case len(files) == 0:
		return errors.New("no TLS certificate: add --tls-cert-file and --tls-private-key-file " +
			"(or, where nobody else can reach the server, --insecure-plaintext)")
	case len(files) == 1:
		return fmt.Errorf("%s is alone: give both --tls-cert-file and --tls-private-key-file", files[0])
	case o.ClientCAFile == "" && !o.takesTokens():
		return errors.New("no agent could prove who it is: add --client-ca-file (for client certificates, as kubelets have them) " +
			"or --agent-service-account=NAMESPACE/NAME (for ServiceAccount tokens)")
	case !o.takesTokens() && o.TokenAudience != "":
		return errors.New("--token-audience is for tokens: add --agent-service-account=NAMESPACE/NAME or leave it out")
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
			err = errors.Join(err, fmt.Errorf("%s is %q: use NAMESPACE/NAME", flag, s))
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
		return model.ServiceKey{}, fmt.Errorf("--server-service is %q: use NAMESPACE/NAME", o.ServerService)
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
