package app

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/config"
	"github.com/slicecast/slicecast/agent/conntrack"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
)

// primary is the keyword in --nodeport-addresses for the Node's own IPs.
const primary = "primary"

// nodePortKeywords are the keywords in --nodeport-addresses that stand for CIDRs.
var nodePortKeywords = map[string][]string{"all": {"0.0.0.0/0", "::/0"}, "localhost": {"127.0.0.0/8", "::1/128"}}

// NodeOptions are the flags about how the node serves Services. Flags that kube-proxy has, too,
// have the same names.
type NodeOptions struct {
	DetectLocalMode        string
	ClusterCIDRs           []string
	PodBridgeInterface     string
	PodInterfaceNamePrefix string

	AllowExternalIPs bool

	MasqueradeAll      bool
	MasqueradeBit      int
	NodePortAddresses  []string
	LocalhostNodePorts *bool // nil if not given

	SyncPeriod    time.Duration
	MinSyncPeriod time.Duration

	Conntrack conntrack.Settings
}

func (o *NodeOptions) addFlags(fs *pflag.FlagSet) {
	o.addDetectionFlags(fs)
	o.addServiceFlags(fs)
	o.addConntrackFlags(fs)
}

func (o *NodeOptions) addDetectionFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.DetectLocalMode, "detect-local-mode", string(view.ByClusterCIDR),
		"Mode to detect traffic from pods: ClusterCIDR (--cluster-cidr), NodeCIDR (the Node's podCIDRs), "+
			"BridgeInterface (--pod-bridge-interface) or InterfaceNamePrefix (--pod-interface-name-prefix). Other "+
			"traffic to cluster IPs is masqueraded. If the mode has no value for an IP family, no traffic to its "+
			"cluster IPs is masqueraded.")
	fs.StringSliceVar(&o.ClusterCIDRs, "cluster-cidr", nil,
		"Comma-separated CIDRs of the cluster's pods, for each IP family, for --detect-local-mode=ClusterCIDR.")
	fs.StringVar(&o.PodBridgeInterface, "pod-bridge-interface", "",
		"Name of the bridge that pods' traffic arrives through, for --detect-local-mode=BridgeInterface.")
	fs.StringVar(&o.PodInterfaceNamePrefix, "pod-interface-name-prefix", "",
		"Prefix of the names of the interfaces that pods' traffic arrives through, for "+
			"--detect-local-mode=InterfaceNamePrefix.")
}

func (o *NodeOptions) addServiceFlags(fs *pflag.FlagSet) {
	fs.BoolVar(&o.AllowExternalIPs, "allow-service-external-ips", true,
		"Serve Services on their externalIPs. Anyone who may write a Service can choose any address for it. If false, "+
			"externalIPs are ignored.")
	fs.BoolVar(&o.MasqueradeAll, "masquerade-all", false,
		"Masquerade all traffic to cluster IPs, including that of pods.")
	fs.IntVar(&o.MasqueradeBit, "iptables-masquerade-bit", 14,
		"Bit (0 to 31) of the packet mark that marks packets to be masqueraded. With --programmer=ipvs, it is a bit "+
			"of the conntrack mark.")
	fs.StringSliceVar(&o.NodePortAddresses, "nodeport-addresses", nil,
		"Comma-separated list of the addresses that have NodePorts: CIDRs, which stand for the node's addresses in "+
			"them; primary, the Node's first InternalIP of each IP family; localhost; or all. In an IP family that no "+
			"entry covers, NodePorts are on all addresses, or on none if primary is in the list. If empty, it is "+
			"primary.")
	fs.VarPF(optionalBool{&o.LocalhostNodePorts}, "iptables-localhost-nodeports", "",
		"If set, NodePorts are on all addresses of the node, as in kube-proxy's mode iptables, unless "+
			"--nodeport-addresses says otherwise. If true, they are also on IPv4 loopback addresses.").NoOptDefVal = "true"
	fs.DurationVar(&o.SyncPeriod, "iptables-sync-period", config.DefaultSyncPeriod,
		"Interval at which all rules are compared with what they should be, with every programmer. With 0, that "+
			"happens only at the start, after errors, and after others have changed the rules.")
	fs.DurationVar(&o.MinSyncPeriod, "iptables-min-sync-period", 0,
		"Minimum interval between two updates of the kernel, with every programmer. With 0, changes are programmed "+
			"at once.")
}

func (o *NodeOptions) addConntrackFlags(fs *pflag.FlagSet) {
	c := &o.Conntrack
	fs.IntVar(&c.MaxPerCore, "conntrack-max-per-core", 32<<10,
		"Maximum number of connections to track per CPU core, and 1048576 in total (0 to leave the limit as it is and "+
			"ignore --conntrack-min). A higher limit is never lowered.")
	fs.IntVar(&c.Min, "conntrack-min", 128<<10,
		"Minimum number of connections to track, regardless of --conntrack-max-per-core.")
	fs.DurationVar(&c.TCPEstablishedTimeout, "conntrack-tcp-timeout-established", 24*time.Hour,
		"Idle timeout of established TCP connections (0 to leave it as it is).")
	fs.DurationVar(&c.TCPCloseWaitTimeout, "conntrack-tcp-timeout-close-wait", time.Hour,
		"Timeout of TCP connections in the CLOSE_WAIT state (0 to leave it as it is).")
	fs.BoolVar(&c.TCPBeLiberal, "conntrack-tcp-be-liberal", false,
		"Do not treat TCP packets outside the window as invalid.")
	fs.DurationVar(&c.UDPTimeout, "conntrack-udp-timeout", 0,
		"Idle timeout of UDP flows without a reply (0 to leave it as it is).")
	fs.DurationVar(&c.UDPStreamTimeout, "conntrack-udp-timeout-stream", 0,
		"Idle timeout of UDP flows with replies (0 to leave it as it is).")
}

// optionalBool is the value of a flag for a bool that need not be set.
type optionalBool struct{ to **bool }

// Set implements pflag.Value.
func (b optionalBool) Set(s string) error {
	v, err := strconv.ParseBool(s)
	if err == nil {
		*b.to = &v
	}
	return err
}

// String implements pflag.Value. It returns "" while nothing is set.
func (b optionalBool) String() string {
	if b.to == nil || *b.to == nil {
		return ""
	}
	return strconv.FormatBool(**b.to)
}

// Type implements pflag.Value.
func (b optionalBool) Type() string { return "bool" }

// validate returns an error that names the flags that are wrong, and says what to do.
func (o *NodeOptions) validate() error {
	_, err := o.view("")
	return errors.Join(err, o.validateDetection(), o.validateTimes())
}

func (o *NodeOptions) validateDetection() error {
	for _, f := range []struct {
		name, value string
		mode        view.DetectLocalMode
	}{
		{"--pod-bridge-interface", o.PodBridgeInterface, view.ByBridgeInterface},
		{"--pod-interface-name-prefix", o.PodInterfaceNamePrefix, view.ByInterfaceNamePrefix},
	} {
		isMode := o.DetectLocalMode == string(f.mode)
		switch {
		case isMode && f.value == "":
			return fmt.Errorf("--detect-local-mode=%s requires %s: set it", f.mode, f.name)
		case !isMode && f.value != "":
			return fmt.Errorf("%s requires --detect-local-mode=%s: set it, or remove %s", f.name, f.mode, f.name)
		case len(f.value) >= unix.IFNAMSIZ:
			return fmt.Errorf("%s is %q: use at most %d characters, as for names of interfaces",
				f.name, f.value, unix.IFNAMSIZ-1)
		}
	}
	if len(o.ClusterCIDRs) > 0 && o.DetectLocalMode != string(view.ByClusterCIDR) {
		return fmt.Errorf("--cluster-cidr requires --detect-local-mode=%s: set it, or remove --cluster-cidr",
			view.ByClusterCIDR)
	}
	return nil
}

func (o *NodeOptions) validateTimes() error {
	c := o.Conntrack
	switch {
	case o.MasqueradeBit < 0 || o.MasqueradeBit > 31:
		return fmt.Errorf("--iptables-masquerade-bit is %d: use 0 to 31", o.MasqueradeBit)
	case o.SyncPeriod < 0 || o.MinSyncPeriod < 0:
		return errors.New("--iptables-sync-period or --iptables-min-sync-period is negative: use 0 or more")
	case o.SyncPeriod > 0 && o.MinSyncPeriod > o.SyncPeriod:
		return fmt.Errorf("--iptables-min-sync-period is %v, longer than --iptables-sync-period (%v): decrease it",
			o.MinSyncPeriod, o.SyncPeriod)
	case c.MaxPerCore < 0 || c.Min < 0:
		return errors.New("--conntrack-max-per-core or --conntrack-min is negative: use 0 or more")
	}
	for name, d := range map[string]time.Duration{
		"tcp-timeout-established": c.TCPEstablishedTimeout, "tcp-timeout-close-wait": c.TCPCloseWaitTimeout,
		"udp-timeout": c.UDPTimeout, "udp-timeout-stream": c.UDPStreamTimeout,
	} {
		if d < 0 || d%time.Second != 0 {
			return fmt.Errorf("--conntrack-%s is %v: use whole seconds, or 0 to leave the timeout as it is", name, d)
		}
	}
	return nil
}

// view returns the options for the view.
func (o *NodeOptions) view(nodeName string) (view.Options, error) {
	v := view.Options{
		NodeName: nodeName, DetectLocal: view.DetectLocalMode(o.DetectLocalMode), BridgeInterface: o.PodBridgeInterface,
		InterfaceNamePrefix: o.PodInterfaceNamePrefix, MasqueradeAll: o.MasqueradeAll, LocalhostNodePorts: o.LocalhostNodePorts,
		RefuseExternalIPs: !o.AllowExternalIPs, NodePortPrimary: slices.Contains(o.NodePortAddresses, primary),
	}
	switch v.DetectLocal {
	case view.ByClusterCIDR, view.ByNodeCIDR, view.ByBridgeInterface, view.ByInterfaceNamePrefix:
	default:
		return v, fmt.Errorf("--detect-local-mode is %q: use ClusterCIDR, NodeCIDR, BridgeInterface or "+
			"InterfaceNamePrefix", o.DetectLocalMode)
	}
	var err error
	if v.ClusterCIDRs, err = parsePrefixes(o.ClusterCIDRs); err != nil {
		return v, fmt.Errorf("--cluster-cidr: %w", err)
	}
	var cidrs []string
	for _, a := range o.NodePortAddresses {
		switch keyword, ok := nodePortKeywords[a]; {
		case ok:
			cidrs = append(cidrs, keyword...)
		case a != primary:
			cidrs = append(cidrs, a)
		}
	}
	if v.NodePortAddresses, err = parsePrefixes(cidrs); err != nil {
		return v, fmt.Errorf("--nodeport-addresses: %w", err)
	}
	return v, nil
}

// warn warns of an IP family of the machine, which has these addresses, in which NodePorts are on
// all of them because --nodeport-addresses is about the other family only.
func (o *NodeOptions) warn(logger *slog.Logger, addresses []netip.Addr) {
	v, err := o.view("")
	if err != nil || v.NodePortPrimary || len(v.NodePortAddresses) == 0 {
		return
	}
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		listed := slices.ContainsFunc(v.NodePortAddresses, func(p netip.Prefix) bool { return model.FamilyOf(p.Addr()) == family })
		has := slices.ContainsFunc(addresses, func(a netip.Addr) bool {
			return a.IsGlobalUnicast() && model.FamilyOf(a) == family
		})
		if has && !listed {
			logger.Warn("NodePorts are on all of the node's addresses of an IP family, because --nodeport-addresses has none of it; "+
				"add primary or a CIDR of that family", "family", family)
		}
	}
}

func parsePrefixes(list []string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, s := range list {
		p, ok := source.ParsePrefix(s)
		if !ok {
			return nil, fmt.Errorf("%q is not a CIDR: use an address and a prefix length, such as 10.128.0.0/14", s)
		}
		out = append(out, p)
	}
	return out, nil
}

// tune sets the kernel parameters of connection tracking. An error is only logged, because a node
// without Services would be worse than one with its old parameters.
func (o *NodeOptions) tune(logger *slog.Logger) {
	if err := o.Conntrack.Apply(logger); err != nil {
		logger.Error("Cannot set the kernel parameters of connection tracking; run the agent with --init-only in a "+
			"privileged init container, or set --conntrack-max-per-core and the timeouts to 0", "err", err)
	}
}
