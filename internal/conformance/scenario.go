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

// Mode is a way to carry out Services in the kernel, in which kube-proxy's behaviour differs.
type Mode string

// The modes.
const (
	IPTables Mode = "iptables"
	NFTables Mode = "nftables"
	IPVS     Mode = "ipvs"
)

// Case is one file.
type Case struct {
	// ID is the file's name without its extension.
	ID string `yaml:"-"`

	Name    string
	Feature string
	// Source names the test of kube-proxy that the case is from.
	Source string
	Notes  string
	// Modes that the case is for; nil: all.
	Modes  []Mode
	Config Config
	Node   Node
	// Objects are there from the beginning, with their Status, and what they lead to is the first thing to check.
	Objects Objects
	Status  []Status
	Checks  `yaml:",inline"`
	// Steps follow, each on top of the state before it.
	Steps []Step
}

// Config is how the agent is to be started. What is nil is not in the file, and means what the format says.
type Config struct {
	ClusterCIDRs       []Prefix         `yaml:"clusterCIDRs"`
	DetectLocalMode    *DetectLocalMode `yaml:"detectLocalMode"`
	NodePortAddresses  []string         `yaml:"nodePortAddresses"`
	LocalhostNodePorts *bool            `yaml:"localhostNodePorts"`
	MasqueradeAll      bool             `yaml:"masqueradeAll"`
	NoExternalIPs      bool             `yaml:"noExternalIPs"`
}

// DetectLocalMode says how the traffic of the cluster's own pods is told.
type DetectLocalMode string

// The values of [Config.DetectLocalMode].
const (
	ClusterCIDR DetectLocalMode = "ClusterCIDR"
	NodeCIDR    DetectLocalMode = "NodeCIDR"
	NoDetection DetectLocalMode = "none"
)

// Node is the one that the agent runs on.
type Node struct {
	Name string
	// IPs are its InternalIPs, ExtraIPs further addresses that it has.
	IPs      []Addr `yaml:"ips"`
	ExtraIPs []Addr `yaml:"extraIPs"`
	// Zone is that of its label; nil: it has none.
	Zone     *string
	PodCIDR  Prefix   `yaml:"podCIDR"`
	PodCIDRs []Prefix `yaml:"podCIDRs"`
}

// Step changes something and says what must be true then.
type Step struct {
	Name  string
	Notes string
	// Modes that the step is for; nil: all. In others it is left out.
	Modes []Mode

	AddLocalAddresses []Prefix         `yaml:"addLocalAddresses"`
	InjectConntrack   []ConntrackEntry `yaml:"injectConntrack"`
	Delete            []Reference
	Apply             Objects
	Patch             []Patch
	Status            []Status
	Action            Action
	// WithinSeconds is how long the change may take; 0: as usual.
	WithinSeconds int `yaml:"withinSeconds"`

	ExpectConntrack ExpectConntrack `yaml:"expectConntrack"`
	Checks          `yaml:",inline"`
}

// Checks are what must be true.
type Checks struct {
	Flows        []Flow
	Sessions     []Session
	HealthChecks []HealthCheck `yaml:"healthChecks"`
	// ProxyHealth are the agent's own health checks, asked from the node.
	ProxyHealth []HealthCheck `yaml:"proxyHealth"`
}

// Action is something done to the agent or behind it.
type Action string

// The actions.
const (
	RestartAgent        Action = "restart-agent"
	StopAgentApplyStart Action = "stop-agent-apply-start"
	FlushKubeRules      Action = "flush-kube-rules"
)

// Reference names an object. Namespace is empty for a Node.
type Reference struct {
	Kind, Namespace, Name string
}

// Patch is a merge patch of an object.
type Patch struct {
	Reference `yaml:",inline"`
	Type      string
	Patch     map[string]any
}

// Status is what a controller writes to an object's status.
type Status struct {
	Reference `yaml:",inline"`
	Status    map[string]any
}

// ConntrackEntry is a connection that the node's kernel is made to remember.
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

// ExpectConntrack names entries by their ID.
type ExpectConntrack struct {
	Deleted, Kept []string
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

// Connections are from where to where.
type Connections struct {
	Name string
	From Origin
	// Src is where they come from; invalid: the origin's default.
	Src Addr
	// SrcRange, in place of Src, are addresses used in turn.
	SrcRange Range `yaml:"srcRange"`
	// Sport is the source port; 0: any, another for each connection.
	Sport uint16
	Proto Proto
	Dst   Addr
	Port  uint16
}

// Flow is what becomes of the first packet of a new connection.
type Flow struct {
	Connections `yaml:",inline"`
	// GoesOn says that the client goes on sending from its source port: what became of its packets before is not to last.
	GoesOn         bool `yaml:"goesOn"`
	Expect         Expectation
	ExpectNFTables *Expectation `yaml:"expectNftables"`
	ExpectIPVS     *Expectation `yaml:"expectIpvs"`
	// ExpectSlicecast is for ours, in every mode, where kube-proxy does worse in each of its own.
	ExpectSlicecast *Expectation `yaml:"expectSlicecast"`
	// Accept are results that are tolerated.
	Accept []Expectation
}

// Session is a series of connections by clients that have affinity.
type Session struct {
	Connections     `yaml:",inline"`
	Count           int           `yaml:"connections"`
	IntervalSeconds float64       `yaml:"intervalSeconds"`
	Expect          ExpectSession `yaml:"expect"`
	// Group is the same for sessions that reach the same backend, GroupIPVS where IPVS differs.
	Group     string
	GroupIPVS string `yaml:"groupIpvs"`
}

// ExpectSession says which backends are possible, and how many are reached: Distinct, or at least DistinctMin.
type ExpectSession struct {
	Backends    []AddrPort
	Distinct    int
	DistinctMin int `yaml:"distinctMin"`
}

// Expectation is what a flow leads to: backends, or a verdict.
type Expectation struct {
	// Backends are exactly those that are reached over many connections.
	Backends   []AddrPort
	Masquerade Masquerade
	Verdict    Verdict
}

// Masquerade says whether a backend sees another source than the client's.
type Masquerade string

// The values of [Expectation.Masquerade].
const (
	Masqueraded    Masquerade = "true"
	SourceKept     Masquerade = "false"
	HairpinOnly    Masquerade = "hairpin-only"
	MasqueradedAny Masquerade = "any"
)

// Verdict is what becomes of a packet that reaches no backend.
type Verdict string

// The verdicts.
const (
	Reject Verdict = "REJECT"
	Drop   Verdict = "DROP"
	Accept Verdict = "ACCEPT"
)

// HealthCheck is an HTTP request and its answer.
type HealthCheck struct {
	// From is empty for [Step.ProxyHealth].
	From   Origin
	URL    string `yaml:"url"`
	Expect ExpectHealth
	// ExpectSlicecast is for ours where kube-proxy does worse, or does not run any more.
	ExpectSlicecast *ExpectHealth `yaml:"expectSlicecast"`
}

// ExpectHealth is an answer, or that the connection is refused.
type ExpectHealth struct {
	Refused bool
	Status  int
	Headers map[string]string
	// Body is a part of the JSON object, BodyKeys are in it too, and BodyAbsent are not.
	Body       map[string]any
	BodyKeys   []string `yaml:"bodyKeys"`
	BodyAbsent []string `yaml:"bodyAbsent"`
}

// key is the same for equal configurations.
func (c Config) key() string {
	text, err := json.Marshal(c)
	if err != nil {
		panic(err) // plain values
	}
	return string(text)
}

// In tells whether the case is for a mode.
func (c *Case) In(mode Mode) bool { return c.Modes == nil || slices.Contains(c.Modes, mode) }

// All gives the steps for a mode. The first is the case's beginning, and has no name.
func (c *Case) All(mode Mode) []*Step {
	all := []*Step{{Apply: c.Objects, Status: c.Status, Checks: c.Checks}}
	for i := range c.Steps {
		if c.Steps[i].In(mode) {
			all = append(all, &c.Steps[i])
		}
	}
	return all
}

// In tells whether the step is for a mode.
func (s *Step) In(mode Mode) bool { return s.Modes == nil || slices.Contains(s.Modes, mode) }

// Interval between the connections.
func (s *Session) Interval() time.Duration {
	return time.Duration(s.IntervalSeconds * float64(time.Second))
}

// Load reads the cases of a folder, in the order of their names. It refuses what it does not know, saying where.
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

// decodeStrict decodes the only document of a text; errors name line and field.
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

// Range is the addresses from First to Last, written with a dash between. The zero value has none.
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
			err = fmt.Errorf("%q is no range of addresses", text)
		}
		return Range{from, to}, err
	}, r)
}

// All gives the addresses in order.
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

// parse reads a scalar; its error names the line.
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

// defaultClusterCIDRs are those of [Config.ClusterCIDRs] where a case has none.
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
