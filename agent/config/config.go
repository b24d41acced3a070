// Package config has the fields of the agent's configuration file, and converts kube-proxy's. A
// field has kube-proxy's name where the meaning is the same.
package config

import (
	"time"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/configfile"
)

// Kind is the kind of the agent's file.
const Kind = "AgentConfiguration"

// DefaultSyncPeriod is the default of the flag for iptables.syncPeriod.
const DefaultSyncPeriod = time.Hour

// Agent is the content of a file, as the package configfile describes it.
type Agent struct {
	metav1.TypeMeta `json:",inline"`

	NodeName *string `json:"nodeName,omitempty" flag:"node-name"`

	Servers          []string          `json:"servers,omitempty" flag:"servers"`
	ServerService    *string           `json:"serverService,omitempty" flag:"server-service"`
	Source           *string           `json:"source,omitempty" flag:"source"`
	ClientConnection *ClientConnection `json:"clientConnection,omitempty"`
	Manifests        *string           `json:"manifests,omitempty" flag:"manifests"`
	ServiceProxyName *string           `json:"serviceProxyName,omitempty" flag:"service-proxy-name"`
	BesideKubeProxy  *bool             `json:"besideKubeProxy,omitempty" flag:"beside-kube-proxy"`
	Checkpoint       *string           `json:"checkpoint,omitempty" flag:"checkpoint"`
	TLS              *TLS              `json:"tls,omitempty"`

	Programmer         *string   `json:"programmer,omitempty" flag:"programmer"`
	ProgrammerFallback *bool     `json:"programmerFallback,omitempty" flag:"programmer-fallback"`
	IPTables           *IPTables `json:"iptables,omitempty"`
	IPVS               *IPVS     `json:"ipvs,omitempty"`

	DetectLocalMode   *string      `json:"detectLocalMode,omitempty" flag:"detect-local-mode"`
	DetectLocal       *DetectLocal `json:"detectLocal,omitempty"`
	ClusterCIDR       *string      `json:"clusterCIDR,omitempty" flag:"cluster-cidr"`
	NodePortAddresses []string     `json:"nodePortAddresses,omitempty" flag:"nodeport-addresses"`
	Conntrack         *Conntrack   `json:"conntrack,omitempty"`

	AllowServiceExternalIPs *bool `json:"allowServiceExternalIPs,omitempty" flag:"allow-service-external-ips"`

	HealthzBindAddress       *string  `json:"healthzBindAddress,omitempty" flag:"healthz-bind-address"`
	MetricsBindAddress       *string  `json:"metricsBindAddress,omitempty" flag:"metrics-bind-address"`
	Pages                    []string `json:"pages,omitempty" flag:"pages"`
	EnableProfiling          *bool    `json:"enableProfiling,omitempty" flag:"profiling"`
	SecureMetricsBindAddress *string  `json:"secureMetricsBindAddress,omitempty" flag:"secure-metrics-bind-address"`
	MetricsCertFile          *string  `json:"metricsCertFile,omitempty" flag:"metrics-cert-file"`
	MetricsKeyFile           *string  `json:"metricsKeyFile,omitempty" flag:"metrics-key-file"`
	MetricsClientCAFile      *string  `json:"metricsClientCAFile,omitempty" flag:"metrics-client-ca-file"`
	MetricsTokenAudience     *string  `json:"metricsTokenAudience,omitempty" flag:"metrics-token-audience"`
	MetricsServiceAccounts   []string `json:"metricsServiceAccounts,omitempty" flag:"metrics-service-accounts"`
	StatusSocket             *string  `json:"statusSocket,omitempty" flag:"status-socket"`
	Logging                  *Logging `json:"logging,omitempty"`
}

// ClientConnection configures the connection to the API server.
type ClientConnection struct {
	Kubeconfig *string `json:"kubeconfig,omitempty" flag:"kubeconfig"`
}

// TLS configures the connections to the servers.
type TLS struct {
	CAFile            *string `json:"caFile,omitempty" flag:"ca-file"`
	CAConfigMap       *string `json:"caConfigMap,omitempty" flag:"ca-config-map"`
	ServerName        *string `json:"serverName,omitempty" flag:"server-name"`
	TokenFile         *string `json:"tokenFile,omitempty" flag:"token-file"`
	ClientCertFile    *string `json:"clientCertFile,omitempty" flag:"client-cert-file"`
	ClientKeyFile     *string `json:"clientKeyFile,omitempty" flag:"client-key-file"`
	InsecurePlaintext *bool   `json:"insecurePlaintext,omitempty" flag:"insecure-plaintext"`
}

// IPTables contains the fields about iptables. As in kube-proxy's file, some of them apply to every
// programmer.
type IPTables struct {
	Variant            *string          `json:"variant,omitempty" flag:"iptables-variant"`
	MasqueradeBit      *int32           `json:"masqueradeBit,omitempty" flag:"iptables-masquerade-bit"`
	MasqueradeAll      *bool            `json:"masqueradeAll,omitempty" flag:"masquerade-all"`
	LocalhostNodePorts *bool            `json:"localhostNodePorts,omitempty" flag:"iptables-localhost-nodeports"`
	SyncPeriod         *metav1.Duration `json:"syncPeriod,omitempty" flag:"iptables-sync-period"`
	MinSyncPeriod      *metav1.Duration `json:"minSyncPeriod,omitempty" flag:"iptables-min-sync-period"`
}

// IPVS contains the fields about the IPVS programmer.
type IPVS struct {
	Scheduler     *string          `json:"scheduler,omitempty" flag:"ipvs-scheduler"`
	StrictARP     *bool            `json:"strictARP,omitempty" flag:"ipvs-strict-arp"`
	ExcludeCIDRs  []string         `json:"excludeCIDRs,omitempty" flag:"ipvs-exclude-cidrs"`
	TCPTimeout    *metav1.Duration `json:"tcpTimeout,omitempty" flag:"ipvs-tcp-timeout"`
	TCPFinTimeout *metav1.Duration `json:"tcpFinTimeout,omitempty" flag:"ipvs-tcpfin-timeout"`
	UDPTimeout    *metav1.Duration `json:"udpTimeout,omitempty" flag:"ipvs-udp-timeout"`
	DrainLimit    *metav1.Duration `json:"drainLimit,omitempty" flag:"ipvs-drain-limit"`
}

// DetectLocal contains what some values of detectLocalMode need.
type DetectLocal struct {
	BridgeInterface     *string `json:"bridgeInterface,omitempty" flag:"pod-bridge-interface"`
	InterfaceNamePrefix *string `json:"interfaceNamePrefix,omitempty" flag:"pod-interface-name-prefix"`
}

// Conntrack contains settings of the kernel's connection tracking.
type Conntrack struct {
	MaxPerCore            *int32           `json:"maxPerCore,omitempty" flag:"conntrack-max-per-core"`
	Min                   *int32           `json:"min,omitempty" flag:"conntrack-min"`
	TCPEstablishedTimeout *metav1.Duration `json:"tcpEstablishedTimeout,omitempty" flag:"conntrack-tcp-timeout-established"`
	TCPCloseWaitTimeout   *metav1.Duration `json:"tcpCloseWaitTimeout,omitempty" flag:"conntrack-tcp-timeout-close-wait"`
	TCPBeLiberal          *bool            `json:"tcpBeLiberal,omitempty" flag:"conntrack-tcp-be-liberal"`
	UDPTimeout            *metav1.Duration `json:"udpTimeout,omitempty" flag:"conntrack-udp-timeout"`
	UDPStreamTimeout      *metav1.Duration `json:"udpStreamTimeout,omitempty" flag:"conntrack-udp-timeout-stream"`
}

// Logging configures the agent's log.
type Logging struct {
	Level  *string `json:"level,omitempty" flag:"log-level"`
	Format *string `json:"format,omitempty" flag:"log-format"`
}

// Parse parses a file's content. An unknown or repeated field is an error that names the field.
func Parse(content []byte) (*Agent, error) {
	var a Agent
	if err := configfile.Parse(content, Kind, &a); err != nil {
		return nil, err
	}
	return &a, nil
}

// FromFlags returns the configuration that has the same effect as the values of flags. Fields of
// flags that are neither given nor have a default are nil.
func FromFlags(fs *pflag.FlagSet) *Agent {
	a := &Agent{TypeMeta: metav1.TypeMeta{APIVersion: configfile.APIVersion, Kind: Kind}}
	configfile.FromFlags(a, fs)
	return a
}
