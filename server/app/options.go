package app

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/auth"
	"github.com/slicecast/slicecast/internal/configfile"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/source/file"
	"github.com/slicecast/slicecast/internal/source/kube"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/tlsfiles"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/certificates"
	"github.com/slicecast/slicecast/server/fanout"
	"github.com/slicecast/slicecast/server/page"
)

// These are the values of --source. sourceUpstream makes the server a relay.
const sourceKube, sourceFile, sourceUpstream = "kube", "file", "upstream"

// rootAudience and relayAudience are the defaults of --token-audience. They differ, so that a relay
// cannot present its agents' tokens to the servers that feed it.
const rootAudience, relayAudience = "slicecast", "slicecast-relay"

// defaultGracePeriod leaves time to end for streams that are drained late in the window, and for
// other calls.
const defaultGracePeriod = 2 * fanout.DefaultDrainWindow

// Options has the values of the command line's flags. Some of them are fields of the configuration;
// Complete derives the other fields.
type Options struct {
	Config

	kubeconfig, manifests, serviceProxyName string
	upstream                                upstreamOptions

	advertiseServers []string
	serverService    string

	files                        tlsfiles.Files
	tlsSecret                    string
	caConfigMaps                 []string
	agentAccounts, relayAccounts []string
	audience                     string
	insecurePlaintext            bool

	log daemon.LogOptions

	file configfile.File
}

// AddFlags adds the flags with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.file.AddFlag(fs)
	o.addSourceFlags(fs)
	o.addListenerFlags(fs)
	o.addTuningFlags(fs)
	o.log.AddFlags(fs)
}

func (o *Options) addSourceFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.SourceKind, "source", sourceKube,
		"Where Services and EndpointSlices come from: kube (a Kubernetes API server), file (a directory of "+
			"manifests), or upstream (other slicecast-servers, which makes this server a relay).")
	fs.StringVar(&o.kubeconfig, "kubeconfig", "",
		"Path to the kubeconfig file for the API server, for --source=kube, TokenReviews and --tls-secret. "+
			"If empty, the in-cluster configuration is used.")
	fs.StringVar(&o.manifests, "manifests", "",
		"Path to the directory of manifests for --source=file. Changes in the directory take effect at once.")
	fs.StringVar(&o.serviceProxyName, "service-proxy-name", "",
		"Value of the label service.kubernetes.io/service-proxy-name of the Services to serve. "+
			"If empty, the Services without the label are served.")
	o.upstream.addFlags(fs)
	fs.StringSliceVar(&o.advertiseServers, "advertise-servers", nil,
		"Comma-separated addresses (host:port) of all servers that agents may connect to, including this one. "+
			"Agents spread over them.")
	fs.StringVar(&o.serverService, "server-service", "",
		"Service (namespace/name) of the servers. Its ready endpoints are advertised to agents, "+
			"as with --advertise-servers. It must have a cluster IP.")
}

func (o *Options) addListenerFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.BindAddress, "bind-address", ":8472", "Address (host:port) to serve gRPC on.")
	fs.StringVar(&o.files.Certificate, "tls-cert-file", "",
		"Path to the PEM file with the server's certificate and its chain. The file is reloaded when it changes.")
	fs.StringVar(&o.files.PrivateKey, "tls-private-key-file", "",
		"Path to the PEM file with the private key of --tls-cert-file. The file is reloaded when it changes.")
	fs.StringVar(&o.tlsSecret, "tls-secret", "",
		"Secret (namespace/name) in which the servers keep a CA and a certificate of their own, instead of "+
			"--tls-cert-file, --tls-private-key-file and --client-ca-file. The servers create the Secret and renew its "+
			"content. The certificate is for the DNS name of --server-service.")
	fs.StringArrayVar(&o.caConfigMaps, "ca-config-map", nil,
		"ConfigMap (namespace/name) in which the servers publish the CAs of --tls-secret for clients, under the key "+
			"ca.crt. The flag may be repeated.")
	fs.StringVar(&o.files.CA, "client-ca-file", "",
		"Path to the PEM file with the CA certificates that client certificates are verified against. The "+
			"organization of a certificate says whether the client is a node (as for kubelets), a relay, an observer "+
			"or an operator. The file is reloaded when it changes.")
	fs.StringArrayVar(&o.agentAccounts, "agent-service-account", nil,
		"ServiceAccount (namespace/name) of agents. A token that is bound to a Pod authenticates the agent of the "+
			"Pod's node. The flag may be repeated.")
	fs.StringArrayVar(&o.relayAccounts, "relay-service-account", nil,
		"ServiceAccount (namespace/name) of relays, whose tokens authenticate relays of this server. The flag may be "+
			"repeated.")
	fs.StringVar(&o.audience, "token-audience", "",
		"Audience of the tokens of this server's agents and relays. No server that feeds this one may accept the same "+
			"audience. If empty, it is "+rootAudience+", or "+relayAudience+" with --source=upstream.")
	fs.BoolVar(&o.insecurePlaintext, "insecure-plaintext", false,
		"Serve gRPC and metrics without TLS and without authentication. Every client is then an operator.")
	fs.StringVar(&o.DebugSocket, "debug-socket", "",
		"Path of a Unix socket on which to serve gRPC to operators on this machine, without TLS. Only the server's "+
			"own user can open it. If empty, there is no such socket.")
	fs.StringVar(&o.HealthzBindAddress, "healthz-bind-address", "",
		"Address (host:port) to serve /healthz, /livez and /readyz on, over HTTP without authentication. "+
			"If empty, they are not served.")
	fs.StringVar(&o.MetricsBindAddress, "metrics-bind-address", "",
		"Address (host:port) to serve /metrics and the page on, over TLS to observers and operators. If empty, neither "+
			"is served.")
	fs.BoolVar(&o.Page, "page", true,
		"Serve a page at "+page.Path+" of --metrics-bind-address on which people see the server's nodes and changes.")
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
	fs.DurationVar(&o.GracePeriod, "shutdown-grace-period", defaultGracePeriod,
		"Maximum time to wait for calls to end when the server stops. It must be at least --drain-window.")
}

type problems []error

func (p *problems) when(holds bool, format string, args ...any) {
	if holds {
		*p = append(*p, fmt.Errorf(format, args...))
	}
}

// validate returns an error for everything that is wrong with the options.
func (o *Options) validate() error {
	var p problems
	p.when(!slices.Contains([]string{sourceKube, sourceFile, sourceUpstream}, o.SourceKind),
		"--source is %q: use kube, file or upstream", o.SourceKind)
	p.when(o.SourceKind == sourceUpstream && o.serviceProxyName != "",
		"--service-proxy-name has no effect on a relay: set it on the servers that feed the relay, and remove it here")
	p.when(len(o.advertiseServers) > 0 && o.serverService != "",
		"--advertise-servers and --server-service exclude each other: remove one of them")
	for _, s := range o.advertiseServers {
		_, _, err := net.SplitHostPort(s)
		p.when(err != nil, "--advertise-servers: %w: use host:port", err)
	}
	p.when(o.SourceKind == sourceFile && o.manifests == "", "--source=file requires --manifests: set it to a directory")
	p.when(o.SourceKind != sourceFile && o.manifests != "", "--manifests requires --source=file: set it, or remove "+
		"--manifests")
	p.when(o.SourceKind != sourceKube && o.kubeconfig != "" && !o.takesTokens() && o.tlsSecret == "",
		"--kubeconfig requires --source=kube, --agent-service-account, --relay-service-account or --tls-secret: set one "+
			"of them, or remove --kubeconfig")
	p.when(o.SourceKind == sourceFile && o.kubeconfig == "" && o.takesTokens(),
		"--agent-service-account and --relay-service-account require an API server that reviews tokens: set "+
			"--kubeconfig, or use --client-ca-file instead")
	_, isService := model.ParseServiceKey(o.serverService)
	p.when(o.serverService != "" && !isService, "--server-service is %q: use namespace/name", o.serverService)
	_, agentsErr := auth.ParseServiceAccounts("--agent-service-account", o.agentAccounts)
	_, relaysErr := auth.ParseServiceAccounts("--relay-service-account", o.relayAccounts)
	p = append(p, o.upstream.validate(o.SourceKind == sourceUpstream), source.ValidateProxyName(o.serviceProxyName),
		agentsErr, relaysErr, o.validateTLS(), o.validateTuning())
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
	p.when(o.GracePeriod < o.DrainWindow,
		"--shutdown-grace-period is %v, less than --drain-window (%v): increase it, so that streams can end as they "+
			"are asked to",
		o.GracePeriod, o.DrainWindow)
	return errors.Join(p...)
}

// validateSecret returns an error for everything that is wrong with --tls-secret and
// --ca-config-map by themselves.
func (o *Options) validateSecret() error {
	var p problems
	for flag, values := range map[string][]string{"--tls-secret": {o.tlsSecret}, "--ca-config-map": o.caConfigMaps} {
		for _, v := range values {
			_, ok := model.ParseServiceKey(v) // these objects are named in the same way
			p.when(v != "" && !ok, "%s is %q: use namespace/name", flag, v)
		}
	}
	p.when(o.tlsSecret != "" && o.serverService == "",
		"--tls-secret requires --server-service, whose DNS name the certificate is for: set it")
	p.when(o.tlsSecret != "" && len(o.caConfigMaps) == 0,
		"--tls-secret requires --ca-config-map, from which clients have the CAs: set it")
	p.when(o.tlsSecret == "" && len(o.caConfigMaps) > 0,
		"--ca-config-map requires --tls-secret: set it, or remove --ca-config-map")
	return errors.Join(p...)
}

func (o *Options) validateTLS() error {
	if err := o.validateSecret(); err != nil {
		return err
	}
	set := func(flags map[string]bool) []string {
		maps.DeleteFunc(flags, func(_ string, is bool) bool { return !is })
		return slices.Sorted(maps.Keys(flags))
	}
	files := set(map[string]bool{
		"--tls-cert-file": o.files.Certificate != "", "--tls-private-key-file": o.files.PrivateKey != "",
		"--tls-secret": o.tlsSecret != "",
	})
	clients := set(map[string]bool{
		"--client-ca-file": o.files.CA != "", "--agent-service-account": len(o.agentAccounts) > 0,
		"--relay-service-account": len(o.relayAccounts) > 0, "--token-audience": o.audience != "",
	})
	switch {
	case o.insecurePlaintext && len(files)+len(clients) > 0:
		return fmt.Errorf("--insecure-plaintext means no TLS and no authentication: remove it, or remove %s",
			strings.Join(append(files, clients...), ", "))
	case o.insecurePlaintext:
		return nil
	case len(files) == 0:
		return errors.New("no TLS certificate: set --tls-secret, or --tls-cert-file and --tls-private-key-file, or " +
			"--insecure-plaintext where nobody else can reach the server")
	case o.tlsSecret != "" && (len(files) > 1 || o.files.CA != ""):
		return errors.New("--tls-secret excludes --tls-cert-file, --tls-private-key-file and --client-ca-file: remove " +
			"it, or remove them")
	case o.tlsSecret != "" && !o.takesTokens():
		return errors.New("no agent can authenticate: set --agent-service-account to accept ServiceAccount tokens, or " +
			"--relay-service-account if this server has relays only")
	case o.tlsSecret != "":
	case len(files) == 1:
		return errors.New("--tls-cert-file and --tls-private-key-file must be set together")
	case o.files.CA == "" && !o.takesTokens():
		return errors.New("no agent can authenticate: set --client-ca-file to accept client certificates, such as " +
			"those of kubelets, or --agent-service-account to accept ServiceAccount tokens")
	case !o.takesTokens() && o.audience != "":
		return errors.New("--token-audience requires --agent-service-account or --relay-service-account: set one of " +
			"them, or remove --token-audience")
	}
	return nil
}

func (o *Options) takesTokens() bool {
	return len(o.agentAccounts)+len(o.relayAccounts) > 0
}

// Complete validates the options and returns the configuration for them.
func (o *Options) Complete(logger *slog.Logger) (Config, error) {
	if err := o.validate(); err != nil {
		return Config{}, err
	}
	c := o.Config
	c.Logger = logger
	if c.Registry == nil {
		c.Registry = daemon.NewRegistry()
	}
	if !o.insecurePlaintext && o.tlsSecret == "" {
		c.TLS = &o.files
	}
	for _, address := range o.advertiseServers {
		c.Servers = append(c.Servers, &pb.Server{Address: address})
	}
	c.ServerService, _ = model.ParseServiceKey(o.serverService) // validate has checked it
	var api *rest.Config
	var err error
	if o.SourceKind == sourceKube || o.takesTokens() || o.tlsSecret != "" {
		if api, err = kube.Config(o.kubeconfig); err != nil {
			return Config{}, fmt.Errorf("--kubeconfig: %w", err)
		}
	}
	switch o.SourceKind {
	case sourceUpstream:
		c.Upstream = o.upstream.config(c)
	case sourceFile:
		c.Source, err = file.New(file.Options{
			Directory: o.manifests, ServiceProxyName: o.serviceProxyName, Log: c.Logger, Metrics: c.Registry,
		})
	default:
		c.Source, err = kube.New(kube.Options{
			Config: api, ServiceProxyName: o.serviceProxyName, Log: c.Logger, Metrics: c.Registry,
		})
		if err == nil {
			c.Events, err = kube.NewEvents(api, c.Logger)
		}
	}
	if err != nil {
		return Config{}, fmt.Errorf("--source=%s: %w", o.SourceKind, err)
	}
	if o.tlsSecret != "" {
		if c.Certificates, err = o.certificates(api, c); err != nil {
			return Config{}, err
		}
		c.Now = c.Certificates.Now
	}
	if o.takesTokens() {
		c.Tokens, err = o.tokens(api, c.ServerService.Namespace)
	}
	return c, err
}

// certificates returns the options for certificates of the servers' own. validate has checked the
// names.
func (o *Options) certificates(api *rest.Config, c Config) (*certificates.Options, error) {
	name := func(s string) types.NamespacedName {
		key, _ := model.ParseServiceKey(s)
		return types.NamespacedName(key)
	}
	out := &certificates.Options{
		Secret: name(o.tlsSecret), Names: []string{c.ServerService.Name + "." + c.ServerService.Namespace + ".svc"},
		Log: c.Logger, Registerer: c.Registry,
	}
	for _, s := range o.caConfigMaps {
		out.ConfigMaps = append(out.ConfigMaps, name(s))
	}
	var err error
	out.Client, out.Now, err = kube.Core(api)
	return out, err
}

// tokens returns the options for the review of tokens by servers in a namespace. validate has
// checked the accounts.
func (o *Options) tokens(api *rest.Config, namespace string) (*auth.TokenOptions, error) {
	out := &auth.TokenOptions{Audience: cmp.Or(o.audience, rootAudience), Namespace: namespace}
	if o.audience == "" && o.SourceKind == sourceUpstream {
		out.Audience = relayAudience
	}
	out.Agents, _ = auth.ParseServiceAccounts("", o.agentAccounts)
	out.Relays, _ = auth.ParseServiceAccounts("", o.relayAccounts)
	var err error
	out.Review, out.Access, out.Get, err = kube.Reviews(api)
	return out, err
}
