package app

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// fileKind is the kind of the server's configuration file.
const fileKind = "ServerConfiguration"

// serverConfiguration is the content of the server's configuration file, as the package configfile
// describes it. Fields have the names that the agent's file has where the meaning is the same.
type serverConfiguration struct {
	metav1.TypeMeta `json:",inline"`

	Source           *string               `json:"source,omitempty" flag:"source"`
	ClientConnection *fileClientConnection `json:"clientConnection,omitempty"`
	Manifests        *string               `json:"manifests,omitempty" flag:"manifests"`
	ServiceProxyName *string               `json:"serviceProxyName,omitempty" flag:"service-proxy-name"`
	Upstream         *fileUpstream         `json:"upstream,omitempty"`

	AdvertiseServers []string `json:"advertiseServers,omitempty" flag:"advertise-servers"`
	ServerService    *string  `json:"serverService,omitempty" flag:"server-service"`

	BindAddress        *string             `json:"bindAddress,omitempty" flag:"bind-address"`
	TLS                *fileTLS            `json:"tls,omitempty"`
	Authentication     *fileAuthentication `json:"authentication,omitempty"`
	DebugSocket        *string             `json:"debugSocket,omitempty" flag:"debug-socket"`
	HealthzBindAddress *string             `json:"healthzBindAddress,omitempty" flag:"healthz-bind-address"`
	MetricsBindAddress *string             `json:"metricsBindAddress,omitempty" flag:"metrics-bind-address"`
	Page               *bool               `json:"page,omitempty" flag:"page"`

	Shards              *int64           `json:"shards,omitempty" flag:"shards"`
	Tombstones          *int64           `json:"tombstones,omitempty" flag:"tombstones"`
	HeartbeatInterval   *metav1.Duration `json:"heartbeatInterval,omitempty" flag:"heartbeat-interval"`
	MaxBehindWait       *metav1.Duration `json:"maxBehindWait,omitempty" flag:"max-behind-wait"`
	MaxColdSyncBytes    *int64           `json:"maxColdSyncBytes,omitempty" flag:"max-cold-sync-bytes"`
	DrainWindow         *metav1.Duration `json:"drainWindow,omitempty" flag:"drain-window"`
	ShutdownGracePeriod *metav1.Duration `json:"shutdownGracePeriod,omitempty" flag:"shutdown-grace-period"`

	Logging *fileLogging `json:"logging,omitempty"`
}

// fileClientConnection configures the connection to the API server.
type fileClientConnection struct {
	Kubeconfig *string `json:"kubeconfig,omitempty" flag:"kubeconfig"`
}

// fileUpstream configures the connections of a relay to the servers that feed it.
type fileUpstream struct {
	Servers           []string `json:"servers,omitempty" flag:"upstream-servers"`
	CAFile            *string  `json:"caFile,omitempty" flag:"upstream-ca-file"`
	ServerName        *string  `json:"serverName,omitempty" flag:"upstream-server-name"`
	TokenFile         *string  `json:"tokenFile,omitempty" flag:"upstream-token-file"`
	ClientCertFile    *string  `json:"clientCertFile,omitempty" flag:"upstream-client-cert-file"`
	ClientKeyFile     *string  `json:"clientKeyFile,omitempty" flag:"upstream-client-key-file"`
	InsecurePlaintext *bool    `json:"insecurePlaintext,omitempty" flag:"upstream-insecure-plaintext"`
}

// fileTLS configures the server's own certificate.
type fileTLS struct {
	CertFile          *string  `json:"certFile,omitempty" flag:"tls-cert-file"`
	PrivateKeyFile    *string  `json:"privateKeyFile,omitempty" flag:"tls-private-key-file"`
	Secret            *string  `json:"secret,omitempty" flag:"tls-secret"`
	CAConfigMaps      []string `json:"caConfigMaps,omitempty" flag:"ca-config-map"`
	InsecurePlaintext *bool    `json:"insecurePlaintext,omitempty" flag:"insecure-plaintext"`
}

// fileAuthentication configures who is accepted as a client.
type fileAuthentication struct {
	ClientCAFile         *string  `json:"clientCAFile,omitempty" flag:"client-ca-file"`
	AgentServiceAccounts []string `json:"agentServiceAccounts,omitempty" flag:"agent-service-account"`
	RelayServiceAccounts []string `json:"relayServiceAccounts,omitempty" flag:"relay-service-account"`
	TokenAudience        *string  `json:"tokenAudience,omitempty" flag:"token-audience"`
}

// fileLogging configures the server's log.
type fileLogging struct {
	Level  *string `json:"level,omitempty" flag:"log-level"`
	Format *string `json:"format,omitempty" flag:"log-format"`
}
