// This file has the types of the format of cases, and reads cases strictly: what it does not know
// is an error.
package conformance

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// Mode is a way to implement Services in the kernel. The behavior of kube-proxy differs between
// modes.
type Mode string

// The modes.
const (
	IPTables Mode = "iptables"
	NFTables Mode = "nftables"
	IPVS     Mode = "ipvs"
)

// Case is the content of one file.
type Case struct {
	// ID is the name of the file without its extension.
	ID string `yaml:"-"`

	Name    string
	Feature string
	// Source names the test of kube-proxy that the case comes from.
	Source string
	Notes  string
	// Modes are the modes that the case applies to; nil means all modes.
	Modes  []Mode
	Config Config
	Node   Node
	// KubeProxyStops lists the modes, by version such as 1.36, in which a step of the case makes
	// kube-proxy program nothing any more. The case is then played only to record that.
	KubeProxyStops map[string][]Mode `yaml:"kubeProxyStops"`
	// Objects exist from the beginning, with their Status. Checks are made first, before any step.
	Objects Objects
	Status  []Status
	Checks  `yaml:",inline"`
	// Steps follow in order; each starts from the state that the one before it has left.
	Steps []Step
}

// Config is the configuration of the agent. A nil field is absent from the file and has the default
// of the format.
type Config struct {
	ClusterCIDRs       []Prefix         `yaml:"clusterCIDRs"`
	DetectLocalMode    *DetectLocalMode `yaml:"detectLocalMode"`
	NodePortAddresses  []string         `yaml:"nodePortAddresses"`
	LocalhostNodePorts *bool            `yaml:"localhostNodePorts"`
	// PodInterfacePrefix begins the names of pods' interfaces. It is used with InterfaceNamePrefix.
	PodInterfacePrefix string `yaml:"podInterfacePrefix"`
	MasqueradeAll      bool   `yaml:"masqueradeAll"`
	NoExternalIPs      bool   `yaml:"noExternalIPs"`
}

// DetectLocalMode is the way to recognize traffic from the cluster's own pods.
type DetectLocalMode string

// The values of [Config.DetectLocalMode].
const (
	ClusterCIDR         DetectLocalMode = "ClusterCIDR"
	NodeCIDR            DetectLocalMode = "NodeCIDR"
	InterfaceNamePrefix DetectLocalMode = "InterfaceNamePrefix"
	NoDetection         DetectLocalMode = "none"
)

// Node is the node that the agent runs on.
type Node struct {
	Name string
	// IPs are its InternalIPs. ExtraIPs are further addresses on its interfaces.
	IPs      []Addr `yaml:"ips"`
	ExtraIPs []Addr `yaml:"extraIPs"`
	// Zone is the value of its zone label; nil means that it has no such label.
	Zone     *string
	PodCIDR  Prefix   `yaml:"podCIDR"`
	PodCIDRs []Prefix `yaml:"podCIDRs"`
}

// cidrs returns the pod CIDRs as the Node object has them.
func (n *Node) cidrs() []string {
	var cidrs []string
	for _, cidr := range n.PodCIDRs {
		cidrs = append(cidrs, cidr.String())
	}
	return cidrs
}

// Step makes changes and says what must hold afterwards.
type Step struct {
	Name  string
	Notes string
	// Modes are the modes that the step applies to; nil means all modes. In other modes the step is
	// left out.
	Modes []Mode

	AddLocalAddresses []Prefix         `yaml:"addLocalAddresses"`
	InjectConntrack   []ConntrackEntry `yaml:"injectConntrack"`
	Delete            []Reference
	Apply             Objects
	Patch             []Patch
	Status            []Status
	Action            Action
	// Config is the configuration with which the agent starts again; nil means the one before.
	Config *Config
	// NFT are commands of nft that another program executes on the node, before all other changes.
	// They may only be about tables named others.
	NFT string `yaml:"nft"`
	// WithinSeconds bounds the time, in seconds, until the checks must succeed; 0 means
	// settleTimeout.
	WithinSeconds int `yaml:"withinSeconds"`

	ExpectConntrack ExpectConntrack `yaml:"expectConntrack"`
	Checks          `yaml:",inline"`
}

// Checks are the conditions that must hold.
type Checks struct {
	Flows        []Flow
	Sessions     []Session
	HealthChecks []HealthCheck `yaml:"healthChecks"`
	// ProxyHealth are the agent's own health checks, requested from the node.
	ProxyHealth []HealthCheck `yaml:"proxyHealth"`
}

// Action is an action on the agent or on its rules.
type Action string

// The actions.
const (
	RestartAgent        Action = "restart-agent"
	StopAgentApplyStart Action = "stop-agent-apply-start"
	FlushKubeRules      Action = "flush-kube-rules"
)

// Reference names an object. Namespace is empty for kinds without one.
type Reference struct {
	Kind, Namespace, Name string
}

// Patch is a merge patch for an object.
type Patch struct {
	Reference `yaml:",inline"`
	Type      string
	Patch     map[string]any
}

// Status is a status that a controller would write to an object.
type Status struct {
	Reference `yaml:",inline"`
	Status    map[string]any
}

// ConntrackEntry is an entry to create in the node's connection tracking table.
type ConntrackEntry struct {
	ID          string
	Proto       Proto
	Orig, Reply Tuple
}

// Tuple is one direction of a connection.
type Tuple struct {
	Src   Addr
	Sport uint16
	Dst   Addr
	Dport uint16
}

// ExpectConntrack names entries by ID that must be deleted or kept.
type ExpectConntrack struct {
	Deleted, Kept []string
	// KeptBySlicecast are entries that kube-proxy deletes although it should not.
	KeptBySlicecast []string `yaml:"keptBySlicecast"`
}

// of returns what kube-proxy, or Slicecast, must delete and keep.
func (e ExpectConntrack) of(reference bool) ExpectConntrack {
	if reference {
		return ExpectConntrack{Deleted: append(slices.Clone(e.Deleted), e.KeptBySlicecast...), Kept: e.Kept}
	}
	return ExpectConntrack{Deleted: e.Deleted, Kept: append(slices.Clone(e.Kept), e.KeptBySlicecast...)}
}

// Origin is where a connection comes from.
type Origin string

// The origins.
const (
	PodLocal  Origin = "pod-local"
	PodRemote Origin = "pod-remote"
	External  Origin = "external"
	FromNode  Origin = "node"
)

// Proto is a transport protocol.
type Proto string

// The protocols.
const (
	TCP  Proto = "TCP"
	UDP  Proto = "UDP"
	SCTP Proto = "SCTP"
)

// Connections describes the source and destination of connections.
type Connections struct {
	Name string
	From Origin
	// Src is the source address; the zero value means the origin's default.
	Src Addr
	// SrcRange is a range of source addresses that are used in turn. It replaces Src.
	SrcRange Range `yaml:"srcRange"`
	// Sport is the source port; 0 means a different port for each connection.
	Sport uint16
	Proto Proto
	Dst   Addr
	Port  uint16
}

// Flow says what must become of the first packet of a new connection.
type Flow struct {
	Connections `yaml:",inline"`
	// GoesOn means that the client continues to send from its source port. What becomes of its
	// first packets must not last.
	GoesOn         bool `yaml:"goesOn"`
	Expect         Expectation
	ExpectNFTables *Expectation `yaml:"expectNftables"`
	ExpectIPVS     *Expectation `yaml:"expectIpvs"`
	// ExpectSlicecast applies to Slicecast in every mode. It is for cases in which every mode of
	// kube-proxy does something worse.
	ExpectSlicecast *Expectation `yaml:"expectSlicecast"`
	// Accept lists further results that are tolerated.
	Accept []Expectation
}

// Session is a series of connections from clients with session affinity.
type Session struct {
	Connections     `yaml:",inline"`
	Count           int           `yaml:"connections"`
	IntervalSeconds float64       `yaml:"intervalSeconds"`
	Expect          ExpectSession `yaml:"expect"`
	// Group is equal for sessions that must reach the same backend. GroupIPVS replaces it for IPVS
	// if set.
	Group     string
	GroupIPVS string `yaml:"groupIpvs"`
}

// ExpectSession lists the possible backends and says how many of them must be reached: exactly
// Distinct, or at least DistinctMin.
type ExpectSession struct {
	Backends    []AddrPort
	Distinct    int
	DistinctMin int `yaml:"distinctMin"`
}

// Expectation is the expected result of a flow: backends or a verdict.
type Expectation struct {
	// Backends are exactly the backends that many connections must reach.
	Backends   []AddrPort
	Masquerade Masquerade
	Verdict    Verdict
}

// Masquerade says whether a backend sees another source address than the client's.
type Masquerade string

// The values of [Expectation.Masquerade].
const (
	Masqueraded    Masquerade = "true"
	SourceKept     Masquerade = "false"
	HairpinOnly    Masquerade = "hairpin-only"
	MasqueradedAny Masquerade = "any"
)

// Verdict is the fate of a packet that reaches no backend.
type Verdict string

// The verdicts.
const (
	Reject Verdict = "REJECT"
	Drop   Verdict = "DROP"
	Accept Verdict = "ACCEPT"
)

// HealthCheck is an HTTP request and its expected answer.
type HealthCheck struct {
	// From is the origin of the request. It is empty for [Checks.ProxyHealth].
	From   Origin
	URL    string `yaml:"url"`
	Expect ExpectHealth
	// ExpectSlicecast is for ours where kube-proxy does worse, or does not run any more.
	ExpectSlicecast *ExpectHealth `yaml:"expectSlicecast"`
}

// ExpectHealth is an expected answer, or says that the connection must be refused.
type ExpectHealth struct {
	Refused bool
	Status  int
	Headers map[string]string
	// Body is a subset of the JSON object in the answer. The object must have the keys in BodyKeys
	// and must not have those in BodyAbsent.
	Body       map[string]any
	BodyKeys   []string `yaml:"bodyKeys"`
	BodyAbsent []string `yaml:"bodyAbsent"`
}

// key returns a string that is equal for equal configurations.
func (c Config) key() string {
	text, err := json.Marshal(c)
	if err != nil {
		panic(err) // impossible: all values can be encoded
	}
	return string(text)
}

// In reports whether the case applies to a mode.
func (c *Case) In(mode Mode) bool { return c.Modes == nil || slices.Contains(c.Modes, mode) }

// All returns the steps for a mode. The first one is the beginning of the case and has no name.
func (c *Case) All(mode Mode) []*Step {
	all := []*Step{{Apply: c.Objects, Status: c.Status, Checks: c.Checks}}
	for i := range c.Steps {
		if c.Steps[i].In(mode) {
			all = append(all, &c.Steps[i])
		}
	}
	return all
}

// In reports whether the step applies to a mode.
func (s *Step) In(mode Mode) bool { return s.Modes == nil || slices.Contains(s.Modes, mode) }

// Interval returns the pause between two connections.
func (s *Session) Interval() time.Duration {
	return time.Duration(s.IntervalSeconds * float64(time.Second))
}

// Load reads the cases of a folder, ordered by file name. Unknown fields and values are errors that
// name their place.
func Load(dir string) ([]*Case, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("no scenarios: %s has no *.yaml files", dir)
	}
	var cases []*Case
	var errs []error
	for _, file := range files {
		c, err := load(file)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", filepath.Base(file), err))
			continue
		}
		cases = append(cases, c)
	}
	return cases, errors.Join(errs...)
}

func load(file string) (*Case, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	c := &Case{ID: strings.TrimSuffix(filepath.Base(file), ".yaml")}
	if err := decodeStrict(text, c); err != nil {
		return nil, err
	}
	return c, c.validate()
}

// decodeStrict decodes the only document of a text. Errors name the line and the field.
func decodeStrict(text []byte, into any) error {
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	decoder.KnownFields(true)
	if err := decoder.Decode(into); err != nil {
		return err
	}
	if err := decoder.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return errors.New("there is more than one YAML document")
	}
	return nil
}

// Addr is an IP address in a file.
type Addr struct{ netip.Addr }

// AddrPort is an IP address and port in a file.
type AddrPort struct{ netip.AddrPort }

// Prefix is a network in a file.
type Prefix struct{ netip.Prefix }

// Range is a range of addresses. A file has it as the first and the last address with a dash
// between them. The zero value is an empty range.
type Range struct{ First, Last netip.Addr }

// UnmarshalYAML implements [yaml.Unmarshaler].
func (a *Addr) UnmarshalYAML(node *yaml.Node) error {
	return parse(node, netip.ParseAddr, &a.Addr)
}

// UnmarshalYAML implements [yaml.Unmarshaler].
func (a *AddrPort) UnmarshalYAML(node *yaml.Node) error {
	return parse(node, netip.ParseAddrPort, &a.AddrPort)
}

// UnmarshalYAML implements [yaml.Unmarshaler].
func (p *Prefix) UnmarshalYAML(node *yaml.Node) error {
	return parse(node, netip.ParsePrefix, &p.Prefix)
}

// UnmarshalYAML implements [yaml.Unmarshaler].
func (r *Range) UnmarshalYAML(node *yaml.Node) error {
	return parse(node, func(text string) (Range, error) {
		first, last, _ := strings.Cut(text, "-")
		from, err := netip.ParseAddr(first)
		if err != nil {
			return Range{}, err
		}
		to, err := netip.ParseAddr(last)
		if err == nil && (from.BitLen() != to.BitLen() || to.Less(from)) {
			err = fmt.Errorf("%q is not a range of addresses", text)
		}
		return Range{from, to}, err
	}, r)
}

// All returns the addresses of the range in order.
func (r Range) All() []netip.Addr {
	var all []netip.Addr
	for addr := r.First; addr.IsValid(); addr = addr.Next() {
		all = append(all, addr)
		if addr == r.Last {
			break
		}
	}
	return all
}

// parse parses a scalar. Its errors name the line.
func parse[T any](node *yaml.Node, f func(string) (T, error), into *T) error {
	if node.Kind != yaml.ScalarNode {
		return fmt.Errorf("line %d: want text", node.Line)
	}
	value, err := f(node.Value)
	if err != nil {
		return fmt.Errorf("line %d: %w", node.Line, err)
	}
	*into = value
	return nil
}

// defaultClusterCIDRs is used if a case does not set [Config.ClusterCIDRs].
var defaultClusterCIDRs = []string{"10.180.0.0/16", "fd00:10:180::/48"}

func (c Config) clusterCIDRs() []string {
	if c.ClusterCIDRs == nil {
		return defaultClusterCIDRs
	}
	var cidrs []string
	for _, cidr := range c.ClusterCIDRs {
		cidrs = append(cidrs, cidr.String())
	}
	return cidrs
}

func (c Config) detectLocalMode() DetectLocalMode {
	if c.DetectLocalMode == nil {
		return ClusterCIDR
	}
	return *c.DetectLocalMode
}
