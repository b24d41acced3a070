package ipvs

import (
	"cmp"
	"fmt"
	"log/slog"
	"math/bits"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// DefaultScheduler is round robin, which gives each backend of a Service the same number of new
// connections, in turn.
const DefaultScheduler = "rr"

// Schedulers returns the names of the IPVS schedulers that Options accepts. ipvsadm(8) describes
// them.
func Schedulers() []string {
	return []string{"rr", "wrr", "lc", "wlc", "sed", "nq", "dh", "sh", "mh", "lblc", "lblcr"}
}

// Default values of Options.
const (
	// DefaultMasqueradeMark is the bit that kube-proxy uses, although kube-proxy uses it in the
	// packet's mark.
	DefaultMasqueradeMark = 1 << 14
	// DefaultDrainLimit is how long connections to a backend that was removed may last.
	DefaultDrainLimit = 15 * time.Minute
)

// Options are the options for New. The zero value is usable.
type Options struct {
	// Scheduler chooses the backends of all Services. Empty means DefaultScheduler.
	Scheduler string
	// MasqueradeMark is the single bit of conntrack's mark that says that a connection is to be
	// masqueraded. 0 means DefaultMasqueradeMark.
	MasqueradeMark uint32
	// DrainLimit is how long TCP connections to a backend that was removed may last. 0 means
	// DefaultDrainLimit.
	DrainLimit time.Duration
	// StrictARP makes the node answer ARP requests only for addresses of the interface on which they
	// arrive, and so not for those of Services. It is for load balancers that announce these addresses
	// themselves, such as MetalLB.
	StrictARP bool
	// ExcludeCIDRs are the ranges in which virtual services of others stay theirs. Outside of them, a
	// virtual service of others for the address and port of a Service port with affinity becomes that
	// Service port's, because IPVS can have only one.
	ExcludeCIDRs []netip.Prefix
	// TCPTimeout, TCPFinTimeout and UDPTimeout are how long IPVS remembers idle connections of each
	// kind, in whole seconds. 0 leaves the kernel's setting.
	TCPTimeout, TCPFinTimeout, UDPTimeout time.Duration
	// Log receives what is missing on this machine and, at level debug, each write. nil means
	// slog.Default().
	Log *slog.Logger
}

// complete checks the options and sets defaults.
func (o *Options) complete() error {
	o.Scheduler = cmp.Or(o.Scheduler, DefaultScheduler)
	o.MasqueradeMark = cmp.Or(o.MasqueradeMark, DefaultMasqueradeMark)
	o.DrainLimit = cmp.Or(o.DrainLimit, DefaultDrainLimit)
	o.Log = cmp.Or(o.Log, slog.Default())
	if !slices.Contains(Schedulers(), o.Scheduler) {
		return fmt.Errorf("IPVS scheduler %q: it must be one of %s", o.Scheduler, strings.Join(Schedulers(), ", "))
	}
	if bits.OnesCount32(o.MasqueradeMark) != 1 {
		return fmt.Errorf("masquerade mark 0x%x: it must be one bit", o.MasqueradeMark)
	}
	return nil
}
