// Package config reads the agent's configuration file. The file has a versioned kind, and each of
// its fields sets one of the agent's flags. A field has kube-proxy's name where the meaning is the
// same. The flag defines what the field means, and its default.
package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	yamlv3 "go.yaml.in/yaml/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// APIVersion and Kind are what a file has to begin with. Group is the API group.
const (
	Group      = "slicecast.io"
	APIVersion = Group + "/v1alpha1"
	Kind       = "AgentConfiguration"
)

// DefaultSyncPeriod is the default of the flag for iptables.syncPeriod.
const DefaultSyncPeriod = time.Hour

// maxFile bounds the size of a file, in bytes. It is a thousand times what all fields need.
const maxFile = 4 << 20

// Agent is the content of a file. A field that is not given leaves its flag as it is. The struct
// tag "flag" names the flag.
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
	strict, err := decode(content, &a, APIVersion, Kind)
	if err := errors.Join(append(strict, err)...); err != nil {
		return nil, err
	}
	return &a, nil
}

// decode decodes a YAML document of the given kind. strict contains an error for each field that is
// unknown or repeated.
func decode(content []byte, out any, apiVersion, kind string) (strict []error, err error) {
	if len(content) > maxFile {
		return nil, fmt.Errorf("the file has %d bytes, more than the maximum of %d: check that it is the right file",
			len(content), maxFile)
	}
	if err := single(content); err != nil {
		return nil, err
	}
	document, err := yaml.YAMLToJSON(content)
	if err != nil {
		return nil, err
	}
	if bytes.Equal(document, []byte("null")) {
		document = []byte("{}")
	}
	var head metav1.TypeMeta
	if err := kjson.UnmarshalCaseSensitivePreserveInts(document, &head); err != nil {
		return nil, readable(err)
	}
	if head.APIVersion != apiVersion || head.Kind != kind {
		return nil, fmt.Errorf("apiVersion is %q and kind is %q: use apiVersion: %s and kind: %s",
			head.APIVersion, head.Kind, apiVersion, kind)
	}
	if _, err := yaml.YAMLToJSONStrict(content); err != nil {
		strict = append(strict, err)
	}
	more, err := kjson.UnmarshalStrict(document, out)
	return append(strict, more...), readable(err)
}

// readable rewrites an error about a value's type in the terms of the file.
func readable(err error) error {
	wrong, ok := errors.AsType[*json.UnmarshalTypeError](err)
	if !ok {
		return err
	}
	if wrong.Field == "" {
		return fmt.Errorf("the document is of type %s: use an object with apiVersion and kind", wrong.Value)
	}
	hint := ""
	if wrong.Type.Kind() == reflect.String {
		hint = ": use quotes, and for a duration a unit, such as 30s"
	}
	return fmt.Errorf("%s: have %s, want %s%s", wrong.Field, wrong.Value, wrong.Type, hint)
}

// single returns an error if there is more than one YAML document. The decoder would read the first
// and silently ignore the others.
func single(content []byte) error {
	d := yamlv3.NewDecoder(bytes.NewReader(content))
	for count := 0; ; {
		var document yamlv3.Node
		if err := d.Decode(&document); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if len(document.Content) == 1 && document.Content[0].Tag == "!!null" {
			continue // nothing, or only comments, beside a separator
		}
		if count++; count > 1 {
			return errors.New("the file has more than one YAML document: put all fields into one document, without ---")
		}
	}
}

// Setting is a field that is given, as the values of its flag. There is one value, or any number
// for a flag that is a list.
type Setting struct {
	Field, Flag string
	Values      []string
}

// Settings returns the fields that are given, in the order of their declaration.
func (a *Agent) Settings() []Setting { return settings("", reflect.ValueOf(*a)) }

func settings(prefix string, v reflect.Value) []Setting {
	var out []Setting
	for i := range v.NumField() {
		field, value := v.Type().Field(i), v.Field(i)
		if field.Anonymous || value.IsNil() {
			continue
		}
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		s := Setting{Field: prefix + name, Flag: field.Tag.Get("flag")}
		switch x := value.Interface().(type) {
		case []string:
			s.Values = x
		case *string:
			s.Values = []string{*x}
		case *bool:
			s.Values = []string{strconv.FormatBool(*x)}
		case *int32:
			s.Values = []string{strconv.Itoa(int(*x))}
		case *metav1.Duration:
			s.Values = []string{x.Duration.String()}
		default:
			out = append(out, settings(prefix+name+".", value.Elem())...)
			continue
		}
		out = append(out, s)
	}
	return out
}

// FromFlags returns the configuration that has the same effect as the values of flags. Fields of
// flags that are neither given nor have a default are nil.
func FromFlags(fs *pflag.FlagSet) *Agent {
	a := &Agent{TypeMeta: metav1.TypeMeta{APIVersion: APIVersion, Kind: Kind}}
	fill(reflect.ValueOf(a).Elem(), fs)
	return a
}

// fill sets the fields of a struct, and of the structs in it, from the values of their flags. It
// reports whether it has set any.
func fill(v reflect.Value, fs *pflag.FlagSet) (filled bool) {
	for i := range v.NumField() {
		field, value := v.Type().Field(i), v.Field(i)
		if field.Anonymous {
			continue
		}
		name := field.Tag.Get("flag")
		if name == "" {
			section := reflect.New(field.Type.Elem())
			if fill(section.Elem(), fs) {
				value.Set(section)
				filled = true
			}
			continue
		}
		if set(value, fs.Lookup(name)) {
			filled = true
		}
	}
	return filled
}

// set sets a field to the value of its flag, unless that is empty by default.
func set(field reflect.Value, flag *pflag.Flag) bool {
	text := flag.Value.String()
	list, isList := flag.Value.(pflag.SliceValue)
	if isList {
		text = strings.Join(list.GetSlice(), ",")
	}
	if text == "" && (flag.DefValue == "" || isList && flag.DefValue == "[]") {
		return false
	}
	switch to := field.Addr().Interface().(type) {
	case *[]string:
		*to = list.GetSlice()
	case **string:
		*to = &text
	case **bool:
		b := text == "true"
		*to = &b
	case **int32:
		n, _ := strconv.ParseInt(text, 10, 32) // the flag has printed it
		i := int32(n)
		*to = &i
	case **metav1.Duration:
		d, _ := time.ParseDuration(text) // the flag has printed it
		*to = &metav1.Duration{Duration: d}
	}
	return true
}
