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
	fs.StringVar(&o.DetectLocalMode, "detect-local-mode", string(view.ByClusterCIDR),
		"how traffic of pods is told from other traffic: ClusterCIDR (--cluster-cidr), NodeCIDR (the Node's podCIDRs), BridgeInterface (--pod-bridge-interface) or InterfaceNamePrefix (--pod-interface-name-prefix). "+
			"Other traffic to a cluster IP is masqueraded; where none is told, such traffic keeps its source")
	fs.StringSliceVar(&o.ClusterCIDRs, "cluster-cidr", nil, "for --detect-local-mode=ClusterCIDR: the addresses of the cluster's pods, for each IP family")
	fs.StringVar(&o.PodBridgeInterface, "pod-bridge-interface", "", "for --detect-local-mode=BridgeInterface: the bridge that pods' traffic comes in by")
	fs.StringVar(&o.PodInterfaceNamePrefix, "pod-interface-name-prefix", "",
		"for --detect-local-mode=InterfaceNamePrefix: what the names of the interfaces begin with that pods' traffic comes in by")

	fs.BoolVar(&o.AllowExternalIPs, "allow-service-external-ips", true,
		"serve Services on their externalIPs, which anybody may choose who may write a Service; if false, they are left out, and each Service that has some is named in the log and status")
	fs.BoolVar(&o.MasqueradeAll, "masquerade-all", false, "masquerade all traffic to cluster IPs, that of pods too")
	fs.IntVar(&o.MasqueradeBit, "iptables-masquerade-bit", 14, "bit of the packet mark that asks for masquerading, 0 to 31; with --programmer=ipvs, of conntrack's mark")
	fs.StringSliceVar(&o.NodePortAddresses, "nodeport-addresses", nil,
		"where NodePorts are: CIDRs, for the node's addresses in them, primary, for the first InternalIP of each family in the Node's status, localhost, or all. "+
			"A family without any is not restricted, but with primary it has none. The default is primary")
	localhost := fs.VarPF(optional{&o.LocalhostNodePorts}, "iptables-localhost-nodeports", "",
		"have NodePorts as kube-proxy's mode iptables does: on all of the node's addresses unless --nodeport-addresses says otherwise and, if true, over IPv4 on loopback too")
	localhost.NoOptDefVal = "true"

	fs.DurationVar(&o.SyncPeriod, "iptables-sync-period", config.DefaultSyncPeriod,
		"how often all of the kernel's rules are compared with what they should be, whichever the programmer; 0: only at the start, after errors, and when others were seen to change them")
	fs.DurationVar(&o.MinSyncPeriod, "iptables-min-sync-period", 0,
		"least time from one programming of the kernel to the next, whichever the programmer, in which changes gather; 0: they are programmed at once")

	c := &o.Conntrack
	fs.IntVar(&c.MaxPerCore, "conntrack-max-per-core", 32<<10, "how many connections the kernel may track, for each CPU of the machine, up to a million; 0: as it is")
	fs.IntVar(&c.Min, "conntrack-min", 128<<10, "how many connections the kernel may track at least, whatever --conntrack-max-per-core leads to, unless that is 0")
	fs.DurationVar(&c.TCPEstablishedTimeout, "conntrack-tcp-timeout-established", 24*time.Hour, "after how long an idle TCP connection is forgotten; 0: as it is")
	fs.DurationVar(&c.TCPCloseWaitTimeout, "conntrack-tcp-timeout-close-wait", time.Hour, "after how long a TCP connection in CLOSE_WAIT is forgotten; 0: as it is")
	fs.BoolVar(&c.TCPBeLiberal, "conntrack-tcp-be-liberal", false, "have TCP packets with sequence numbers out of the window not count as invalid")
	fs.DurationVar(&c.UDPTimeout, "conntrack-udp-timeout", 0, "after how long a UDP flow without an answer is forgotten; 0: as it is")
	fs.DurationVar(&c.UDPStreamTimeout, "conntrack-udp-timeout-stream", 0, "after how long an idle UDP flow with answers is forgotten; 0: as it is")
}

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
			return fmt.Errorf("--detect-local-mode=%s needs %s", f.mode, f.name)
		case !isMode && f.value != "":
			return fmt.Errorf("%s is for --detect-local-mode=%s: leave it out", f.name, f.mode)
		case len(f.value) >= unix.IFNAMSIZ:
			return fmt.Errorf("%s is %q, longer than the %d characters of an interface's name", f.name, f.value, unix.IFNAMSIZ-1)
		}
	}
	if len(o.ClusterCIDRs) > 0 && o.DetectLocalMode != string(view.ByClusterCIDR) {
		return fmt.Errorf("--cluster-cidr is for --detect-local-mode=%s: leave it out", view.ByClusterCIDR)
	}
	return nil
}

func (o *NodeOptions) validateTimes() error {
	c := o.Conntrack
	switch {
	case o.MasqueradeBit < 0 || o.MasqueradeBit > 31:
		return fmt.Errorf("--iptables-masquerade-bit is %d: use 0 to 31", o.MasqueradeBit)
	case o.SyncPeriod < 0 || o.MinSyncPeriod < 0:
		return errors.New("--iptables-sync-period and --iptables-min-sync-period can't be less than 0")
	case o.SyncPeriod > 0 && o.MinSyncPeriod > o.SyncPeriod:
		return fmt.Errorf("--iptables-min-sync-period is %v, longer than --iptables-sync-period, which is %v", o.MinSyncPeriod, o.SyncPeriod)
	case c.MaxPerCore < 0 || c.Min < 0:
		return errors.New("--conntrack-max-per-core and --conntrack-min can't be less than 0")
	}
	for name, d := range map[string]time.Duration{
		"tcp-timeout-established": c.TCPEstablishedTimeout, "tcp-timeout-close-wait": c.TCPCloseWaitTimeout,
		"udp-timeout": c.UDPTimeout, "udp-timeout-stream": c.UDPStreamTimeout,
	} {
		if d < 0 || d%time.Second != 0 {
			return fmt.Errorf("--conntrack-%s is %v: give whole seconds, or 0 to leave it as it is", name, d)
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
		return v, fmt.Errorf("--detect-local-mode is %q: use ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix", o.DetectLocalMode)
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

func parsePrefixes(list []string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, s := range list {
		p, ok := source.ParsePrefix(s)
		if !ok {
			return nil, fmt.Errorf("%q is no CIDR: give an address and the bits of its prefix, such as 10.128.0.0/14", s)
		}
		out = append(out, p)
	}
	return out, nil
}

// tune applies the settings of the kernel's connection tracking. An error is only logged, because a
// node without Services would be worse than one with its old settings.
func (o *NodeOptions) tune(logger *slog.Logger) {
	if err := o.Conntrack.Apply(logger); err != nil {
		logger.Error("Settings of connection tracking can't be made; they stay as they are. Run the agent once with --init-only in a privileged "+
			"container before, or set --conntrack-max-per-core and the timeouts to 0", "err", err)
	}
}

// optional is the pflag.Value of a *bool that stays nil unless the flag is given.
type optional struct{ p **bool }

func (v optional) String() string {
	if v.p == nil || *v.p == nil {
		return ""
	}
	return strconv.FormatBool(**v.p)
}

func (v optional) Set(s string) error {
	b, err := strconv.ParseBool(s)
	if err != nil {
		return err
	}
	*v.p = &b
	return nil
}

func (v optional) Type() string { return "bool" }
