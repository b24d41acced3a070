package config

import (
	"bytes"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/slicecast/slicecast/agent/programmer/ipvs"
	"github.com/slicecast/slicecast/internal/configfile"
	"github.com/slicecast/slicecast/internal/source"
)

// kubeProxyAPIVersion and kubeProxyKind are what kube-proxy's file begins with.
const (
	kubeProxyAPIVersion = "kubeproxy.config.k8s.io/v1alpha1"
	kubeProxyKind       = "KubeProxyConfiguration"
)

// kubeProxyHealthPort and kubeProxyMetricsPort are the default ports of kube-proxy's /healthz and
// of its metrics.
const (
	kubeProxyHealthPort  = "10256"
	kubeProxyMetricsPort = "10249"
)

// These are kube-proxy's modes on Linux.
const (
	modeIPTables = "iptables"
	modeIPVS     = "ipvs"
	modeNFTables = "nftables"
)

// kubeProxy contains the fields of k8s.io/kube-proxy/config/v1alpha1 (1.37) that have an equivalent
// here. Importing that package would add half of Kubernetes' component base as dependencies.
type kubeProxy struct {
	metav1.TypeMeta    `json:",inline"`
	FeatureGates       map[string]bool  `json:"featureGates"`
	HostnameOverride   string           `json:"hostnameOverride"`
	BindAddress        string           `json:"bindAddress"`
	HealthzBindAddress string           `json:"healthzBindAddress"`
	MetricsBindAddress string           `json:"metricsBindAddress"`
	EnableProfiling    bool             `json:"enableProfiling"`
	Mode               string           `json:"mode"`
	IPTables           kubeProxyMode    `json:"iptables"`
	IPVS               kubeProxyMode    `json:"ipvs"`
	NFTables           kubeProxyMode    `json:"nftables"`
	DetectLocalMode    string           `json:"detectLocalMode"`
	DetectLocal        DetectLocal      `json:"detectLocal"`
	ClusterCIDR        string           `json:"clusterCIDR"`
	NodePortAddresses  []string         `json:"nodePortAddresses"`
	Conntrack          Conntrack        `json:"conntrack"`
	Logging            kubeProxyLogging `json:"logging"`
}

// kubeProxyLogging configures kube-proxy's log.
type kubeProxyLogging struct {
	Format string `json:"format"`
}

// kubeProxyMode contains the fields of the sections of kube-proxy's modes that have an equivalent
// here. Each section has some of them.
type kubeProxyMode struct {
	MasqueradeBit      *int32           `json:"masqueradeBit"`
	MasqueradeAll      bool             `json:"masqueradeAll"`
	LocalhostNodePorts *bool            `json:"localhostNodePorts"`
	MinSyncPeriod      metav1.Duration  `json:"minSyncPeriod"`
	Scheduler          string           `json:"scheduler"`
	StrictARP          bool             `json:"strictARP"`
	ExcludeCIDRs       []string         `json:"excludeCIDRs"`
	TCPTimeout         *metav1.Duration `json:"tcpTimeout"`
	TCPFinTimeout      *metav1.Duration `json:"tcpFinTimeout"`
	UDPTimeout         *metav1.Duration `json:"udpTimeout"`
}

// Note is a remark about a field of kube-proxy's file.
type Note struct{ Field, Text string }

// String returns the note as one line.
func (n Note) String() string { return strings.Join(strings.Fields(n.Field+": "+n.Text), " ") }

// Migrated is the result of migrating kube-proxy's file.
type Migrated struct {
	Agent *Agent
	// Lost contains the fields that could not be carried over, with the reasons. Notes contains what
	// differs because of a field, or because a field is missing.
	Lost, Notes []Note
}

// unknownField is the reason for fields that kube-proxy does not have, or has only in later
// versions.
const unknownField = "there is no such field"

// reasons says why fields, or all fields of a section, are not carried over.
var reasons = map[string]string{
	"bindAddress":         "the node's addresses are those of its Node object: for NodePorts, set nodePortAddresses",
	"bindAddressHardFail": "a port that is in use is logged, counted and tried again; the agent runs on",
	"clientConnection": "an agent with servers does not use the API server; with source: kube, set " +
		"clientConnection.kubeconfig",
	"configSyncPeriod": "the agent does not poll",
	"conntrack":        unknownField,
	"logging":          "logging.level is debug, info, warn or error, and logging.format is text or json",
	"metricsBindAddress": "only loopback addresses are served without TLS: for others, set " +
		"secureMetricsBindAddress, metricsCertFile, metricsKeyFile and metricsClientCAFile",
	"oomScoreAdj":                 "the agent does not change its own OOM score; set it where the agent is started",
	"portRange":                   "kube-proxy does not use it either",
	"showHiddenMetricsForVersion": "there are no hidden metrics",
	"windowsRunAsService":         "there is no agent for Windows",
	"winkernel":                   "there is no agent for Windows",
}

// gateAllowServiceExternalIPs is a feature gate of kube-proxy's that is a setting here.
const gateAllowServiceExternalIPs = "AllowServiceExternalIPs"

// gateReasons says why the other feature gates that change how kube-proxy serves Services on Linux
// (1.33 to 1.37) are not carried over.
var gateReasons = map[string]string{
	"PreferSameTrafficDistribution": "node hints are always followed, as in kube-proxy 1.35 and later, which lock " +
		"this gate",
	"MultiCIDRServiceAllocator": "ServiceCIDRs are followed where the cluster has them, as in kube-proxy 1.34 and " +
		"later, which lock this gate",
	"KubeProxyNFTablesLocalhostNodePorts": "iptables.localhostNodePorts and nodePortAddresses decide about NodePorts " +
		"on loopback addresses, with every programmer",
}

// zeroIsDefault contains kube-proxy's fields for which 0 or false means the same as no value. A
// zero of any other field is reported as lost, like any other value.
var zeroIsDefault = map[string]bool{
	"bindAddressHardFail": true, "configSyncPeriod": true, "enableProfiling": true, "windowsRunAsService": true,
	"clientConnection.burst": true, "clientConnection.qps": true,
	"logging.flushFrequency": true, "logging.options": true, "logging.verbosity": true,
	"iptables.masqueradeAll": true, "iptables.minSyncPeriod": true, "iptables.syncPeriod": true,
	"ipvs.minSyncPeriod": true, "ipvs.strictARP": true, "ipvs.syncPeriod": true, "ipvs.tcpFinTimeout": true, "ipvs.tcpTimeout": true,
	"ipvs.udpTimeout":        true,
	"nftables.masqueradeAll": true, "nftables.minSyncPeriod": true, "nftables.syncPeriod": true,
	"winkernel.enableDSR": true, "winkernel.forwardHealthCheckVip": true,
}

// syncPeriodReason says why syncPeriod is not carried over. In kube-proxy, it serves other
// purposes.
const syncPeriodReason = "the agent notices when others change its rules; iptables.syncPeriod is the interval at " +
	"which it also compares all rules with the kernel"

// Migrate converts kube-proxy's configuration to one with which Services behave the same. The
// result does not say where Services come from.
func Migrate(content []byte) (*Migrated, error) {
	var in kubeProxy
	if _, err := configfile.Decode(content, &in, kubeProxyAPIVersion, kubeProxyKind); err != nil {
		return nil, err // unknown fields are reported as lost
	}
	var given map[string]any
	if err := yaml.Unmarshal(content, &given); err != nil {
		return nil, err
	}
	agent := &Agent{TypeMeta: metav1.TypeMeta{APIVersion: configfile.APIVersion, Kind: Kind}}
	m := &migration{in: in, given: given, out: Migrated{Agent: agent}}
	m.take("apiVersion", "kind")
	if err := m.mode(); err != nil {
		return nil, err
	}
	m.nodePorts()
	m.detectLocal()
	m.featureGates()
	m.others()
	m.rest()
	return &m.out, nil
}

// migration is a migration in progress. A field that is carried over is deleted from given; in the
// end, the rest of given is lost.
type migration struct {
	in    kubeProxy
	given map[string]any
	out   Migrated
}

// take deletes fields from m.given. "section.field" names a single field of a section.
func (m *migration) take(fields ...string) {
	for _, f := range fields {
		name, inner, ok := strings.Cut(f, ".")
		if section, isSection := m.given[name].(map[string]any); ok && isSection {
			delete(section, inner)
		} else if !ok {
			delete(m.given, name)
		}
	}
}

func (m *migration) lose(field, reason string) {
	m.take(field)
	m.out.Lost = append(m.out.Lost, Note{field, reason})
}

func (m *migration) note(field, text string) { m.out.Notes = append(m.out.Notes, Note{field, text}) }

// mode carries over the sections of the modes, as far as kube-proxy uses them in its mode.
func (m *migration) mode() error {
	m.take("mode")
	if m.in.Mode == "" {
		m.in.Mode = modeIPTables
		m.note("mode", "kube-proxy's default is iptables; the agent's is nftables if the kernel supports it, and "+
			"iptables otherwise")
	} else {
		m.out.Agent.Programmer = &m.in.Mode
	}
	// used is the section with kube-proxy's settings of masquerading, and timed the one with its
	// periods.
	used, timed := &m.in.IPTables, &m.in.IPTables
	section := modeIPTables
	switch m.in.Mode {
	case modeIPTables:
	case modeIPVS:
		timed = &m.in.IPVS
		m.ipvs()
	case modeNFTables:
		used, timed, section = &m.in.NFTables, &m.in.NFTables, modeNFTables
	default:
		return fmt.Errorf("mode is %q: only iptables, ipvs and nftables can be converted", m.in.Mode)
	}
	out := &IPTables{MasqueradeBit: used.MasqueradeBit}
	m.take(section+".masqueradeBit", section+".masqueradeAll", m.in.Mode+".minSyncPeriod")
	if used.MasqueradeAll {
		out.MasqueradeAll = &used.MasqueradeAll
	}
	if timed.MinSyncPeriod.Duration != 0 {
		out.MinSyncPeriod = &timed.MinSyncPeriod
	}
	if timed.MinSyncPeriod.Duration > DefaultSyncPeriod {
		out.SyncPeriod = &timed.MinSyncPeriod
		m.note("iptables.syncPeriod", "it is set to "+timed.MinSyncPeriod.Duration.String()+
			", because it cannot be shorter than minSyncPeriod")
	}
	if m.in.Mode == modeIPTables {
		localhost := m.in.IPTables.LocalhostNodePorts == nil || *m.in.IPTables.LocalhostNodePorts
		out.LocalhostNodePorts = &localhost
		m.take("iptables.localhostNodePorts")
	}
	if *out != (IPTables{}) {
		m.out.Agent.IPTables = out
	}
	return nil
}

// ipvs carries over the fields that only mode ipvs has.
func (m *migration) ipvs() {
	in, out := &m.in.IPVS, &IPVS{}
	m.take("ipvs.strictARP", "ipvs.excludeCIDRs")
	switch {
	case in.Scheduler == "":
		m.take("ipvs.scheduler")
	case slices.Contains(ipvs.Schedulers(), in.Scheduler):
		m.take("ipvs.scheduler")
		out.Scheduler = &in.Scheduler
	default:
		m.lose("ipvs.scheduler", fmt.Sprintf("%s is not supported; the default is %s, and the choice is %s",
			in.Scheduler, ipvs.DefaultScheduler, strings.Join(ipvs.Schedulers(), ", ")))
	}
	if len(in.ExcludeCIDRs) > 0 {
		out.ExcludeCIDRs = in.ExcludeCIDRs
	}
	if in.StrictARP {
		out.StrictARP = &in.StrictARP
	}
	out.TCPTimeout = m.timeout("ipvs.tcpTimeout", in.TCPTimeout, true)
	out.TCPFinTimeout = m.timeout("ipvs.tcpFinTimeout", in.TCPFinTimeout, true)
	out.UDPTimeout = m.timeout("ipvs.udpTimeout", in.UDPTimeout, true)
	if !reflect.DeepEqual(*out, IPVS{}) {
		m.out.Agent.IPVS = out
	}
}

// timeout carries over a timeout in whole seconds, which are all that the kernel can store.
// zeroIsDefault means that 0 is the same as no value.
func (m *migration) timeout(field string, d *metav1.Duration, zeroIsDefault bool) *metav1.Duration {
	m.take(field)
	if d == nil {
		return nil
	}
	whole := &metav1.Duration{Duration: d.Duration.Truncate(time.Second)}
	if *whole != *d {
		m.note(field, "it is set to "+whole.Duration.String()+", because the kernel has whole seconds; kube-proxy "+
			"truncates it, too")
	}
	if whole.Duration == 0 && zeroIsDefault {
		return nil
	}
	return whole
}

// nodePorts carries over where NodePorts are. Slicecast's default is that of kube-proxy's mode
// nftables.
func (m *migration) nodePorts() {
	m.take("nodePortAddresses")
	addresses := m.in.NodePortAddresses
	if len(addresses) == 0 && m.in.Mode != modeNFTables {
		addresses = []string{"0.0.0.0/0", "::/0"}
		m.note("nodePortAddresses", "kube-proxy has NodePorts on all of the node's addresses in mode "+m.in.Mode+
			"; the agent's default is primary, which is safer")
	}
	m.out.Agent.NodePortAddresses = addresses
	if len(addresses) == 0 || slices.Contains(addresses, "primary") {
		m.note("nodePortAddresses", "in an IP family in which the Node has no address, primary means all addresses "+
			"for kube-proxy, and none for the agent, unless 0.0.0.0/0 or ::/0 is in the list, too")
	}
}

func (m *migration) detectLocal() {
	m.take("detectLocalMode")
	mode := m.in.DetectLocalMode
	if mode == "" {
		mode = "ClusterCIDR"
	} else {
		m.out.Agent.DetectLocalMode = &mode
	}
	unused := "kube-proxy does not use it with detectLocalMode " + mode
	text := func(field string, value *string, of string) *string {
		switch {
		case value == nil || *value == "":
			return nil
		case mode != of:
			m.lose(field, unused)
			return nil
		}
		m.take(field)
		return value
	}
	m.out.Agent.ClusterCIDR = text("clusterCIDR", &m.in.ClusterCIDR, "ClusterCIDR")
	d := DetectLocal{
		BridgeInterface:     text("detectLocal.bridgeInterface", m.in.DetectLocal.BridgeInterface, "BridgeInterface"),
		InterfaceNamePrefix: text("detectLocal.interfaceNamePrefix", m.in.DetectLocal.InterfaceNamePrefix, "InterfaceNamePrefix"),
	}
	if d != (DetectLocal{}) {
		m.out.Agent.DetectLocal = &d
	}
}

// featureGates carries over the one gate that is a setting here. All other gates are lost, even one
// that is set to its default: setting it says what the user relies on.
func (m *migration) featureGates() {
	for _, gate := range slices.Sorted(maps.Keys(m.in.FeatureGates)) {
		on := m.in.FeatureGates[gate]
		field := "featureGates." + gate
		switch {
		case gate == gateAllowServiceExternalIPs:
			m.take(field)
			if !on {
				m.out.Agent.AllowServiceExternalIPs = &on
			}
		case gateReasons[gate] != "":
			m.lose(field, gateReasons[gate])
		default:
			m.lose(field, "the agent has no feature gates")
		}
	}
}

func (m *migration) others() {
	m.take("hostnameOverride", "healthzBindAddress", "logging.format")
	if name := strings.ToLower(strings.TrimSpace(m.in.HostnameOverride)); name != "" {
		m.out.Agent.NodeName = &name
	}
	health := m.healthz()
	m.out.Agent.HealthzBindAddress = &health
	if f := m.in.Logging.Format; f == "json" { // text is the default
		m.out.Agent.Logging = &Logging{Format: &f}
	}
	if bind, ok := source.ParseAddr(m.in.BindAddress); ok && bind.IsUnspecified() {
		m.take("bindAddress")
	}
	c := m.in.Conntrack
	c.TCPEstablishedTimeout = m.timeout("conntrack.tcpEstablishedTimeout", c.TCPEstablishedTimeout, false)
	c.TCPCloseWaitTimeout = m.timeout("conntrack.tcpCloseWaitTimeout", c.TCPCloseWaitTimeout, false)
	c.UDPTimeout = m.timeout("conntrack.udpTimeout", c.UDPTimeout, true)
	c.UDPStreamTimeout = m.timeout("conntrack.udpStreamTimeout", c.UDPStreamTimeout, true)
	if c.TCPBeLiberal != nil && !*c.TCPBeLiberal {
		c.TCPBeLiberal = nil
	}
	if c != (Conntrack{}) {
		m.out.Agent.Conntrack = &c
	}
	m.take("conntrack.maxPerCore", "conntrack.min", "conntrack.tcpBeLiberal")
	m.metrics()
}

// healthz returns the address of kube-proxy's /healthz, after applying kube-proxy's defaults.
func (m *migration) healthz() string {
	return m.address(m.in.HealthzBindAddress, "0.0.0.0", "::", kubeProxyHealthPort)
}

// metrics carries over the address of kube-proxy's metrics if the agent serves it.
func (m *migration) metrics() {
	if m.take("enableProfiling"); m.in.EnableProfiling {
		m.out.Agent.EnableProfiling = &m.in.EnableProfiling
	}
	address := m.address(m.in.MetricsBindAddress, "127.0.0.1", "::1", kubeProxyMetricsPort)
	if at, err := netip.ParseAddrPort(address); err == nil && at.Addr().IsLoopback() {
		m.take("metricsBindAddress")
		if address != net.JoinHostPort("127.0.0.1", kubeProxyMetricsPort) { // the agent's default
			m.out.Agent.MetricsBindAddress = &address
		}
	}
}

// address returns an address that kube-proxy listens on. If it is not given, it is one of two
// defaults, depending on the family of bindAddress. A missing port is added.
func (m *migration) address(given, default4, default6, port string) string {
	if given == "" {
		given = default4
		if bind, ok := source.ParseAddr(m.in.BindAddress); ok && bind.Is6() {
			given = default6
		}
	}
	if ip, ok := source.ParseAddr(strings.Trim(given, "[]")); ok {
		return net.JoinHostPort(ip.String(), port)
	}
	return given
}

// rest reports everything that was not taken as lost, unless it says nothing.
func (m *migration) rest() {
	sections := []string{"clientConnection", "logging", "iptables", "ipvs", "nftables", "winkernel", "detectLocal", "conntrack"}
	for _, name := range slices.Sorted(maps.Keys(m.given)) {
		section, ok := m.given[name].(map[string]any)
		if !ok || !slices.Contains(sections, name) {
			section = map[string]any{"": m.given[name]}
		}
		for _, inner := range slices.Sorted(maps.Keys(section)) {
			field := strings.TrimSuffix(name+"."+inner, ".")
			if saysNothing(section[inner], zeroIsDefault[field]) {
				continue
			}
			m.lose(field, m.reason(name, field))
		}
	}
}

func (m *migration) reason(section, field string) string {
	isMode := section == modeIPTables || section == modeIPVS || section == modeNFTables
	switch {
	case field == m.in.Mode+".syncPeriod":
		return syncPeriodReason
	case isMode && section != m.in.Mode:
		return "kube-proxy does not use it in mode " + m.in.Mode
	case reasons[section] != "":
		return reasons[section]
	}
	return unknownField
}

// saysNothing reports whether a value is empty, or is 0 or false if zeroToo is set. Files that
// kubeadm writes are full of such values.
func saysNothing(v any, zeroToo bool) bool {
	switch v := v.(type) {
	case nil:
		return true
	case map[string]any:
		for _, inner := range v {
			if !saysNothing(inner, zeroToo) {
				return false
			}
		}
		return true
	case []any:
		return len(v) == 0
	}
	return v == "" || zeroToo && slices.Contains([]any{"0", "0s", float64(0), int64(0), false}, v)
}

// YAML returns the configuration as a file, with the lost fields and the notes as comments.
func (m *Migrated) YAML() ([]byte, error) {
	body, err := yaml.Marshal(m.Agent)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	b.WriteString("# Converted from kube-proxy's configuration by slicecast-agent --migrate-config. Add where " +
		"Services come from:\n# servers or serverService with tls, or source.\n")
	for _, l := range m.Lost {
		fmt.Fprintf(&b, "# Not carried over: %s.\n", l)
	}
	for _, n := range m.Notes {
		fmt.Fprintf(&b, "# Note: %s.\n", n)
	}
	b.Write(body)
	return b.Bytes(), nil
}
