package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/programmer/iptables"
	"github.com/slicecast/slicecast/agent/programmer/ipvs"
	"github.com/slicecast/slicecast/agent/programmer/nftables"
	"github.com/slicecast/slicecast/agent/programmer/printer"
	"github.com/slicecast/slicecast/agent/programmer/takeover"
	"github.com/slicecast/slicecast/agent/verify"
	"github.com/slicecast/slicecast/agent/view"
)

// These are the values of --programmer.
const (
	programmerAuto     = "auto"
	programmerNFTables = "nftables"
	programmerIPTables = "iptables"
	programmerIPVS     = "ipvs"
	programmerPrinter  = "printer"
	programmerShadow   = "shadow"
)

// candidates contains, for each value of --programmer, the programmers to try, in order.
var candidates = map[string][]string{
	programmerAuto:     {programmerNFTables, programmerIPTables},
	programmerNFTables: {programmerNFTables, programmerIPTables},
	programmerIPTables: {programmerIPTables},
	programmerIPVS:     {programmerIPVS, programmerNFTables, programmerIPTables},
	programmerPrinter:  {programmerPrinter},
	programmerShadow:   {programmerShadow},
}

// iptablesVariants contains the values of --iptables-variant.
var iptablesVariants = map[string]iptables.Variant{
	"auto": iptables.DefaultVariant, "nft": iptables.NFT, "legacy": iptables.Legacy,
}

// IPVSOptions are the flags for --programmer=ipvs. They have kube-proxy's names.
type IPVSOptions struct {
	Scheduler                             string
	StrictARP                             bool
	ExcludeCIDRs                          []string
	TCPTimeout, TCPFinTimeout, UDPTimeout time.Duration
	DrainLimit                            time.Duration
}

func (o *IPVSOptions) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.Scheduler, "ipvs-scheduler", ipvs.DefaultScheduler,
		"Scheduler that chooses the backends of Services, for --programmer=ipvs: "+strings.Join(ipvs.Schedulers(), ", ")+".")
	fs.BoolVar(&o.StrictARP, "ipvs-strict-arp", false,
		"Leave it to others, such as MetalLB, to answer ARP requests for Services' addresses, by setting arp_ignore "+
			"to 1 and arp_announce to 2, for --programmer=ipvs.")
	fs.StringSliceVar(&o.ExcludeCIDRs, "ipvs-exclude-cidrs", nil,
		"Comma-separated CIDRs in which the agent never takes over virtual services of others, even for the address "+
			"and port of a Service with session affinity, for --programmer=ipvs.")
	fs.DurationVar(&o.TCPTimeout, "ipvs-tcp-timeout", 0,
		"Idle timeout of TCP connections, for --programmer=ipvs (0 to leave it as it is).")
	fs.DurationVar(&o.TCPFinTimeout, "ipvs-tcpfin-timeout", 0,
		"Timeout of TCP connections after a FIN, for --programmer=ipvs (0 to leave it as it is).")
	fs.DurationVar(&o.UDPTimeout, "ipvs-udp-timeout", 0,
		"Idle timeout of UDP flows, for --programmer=ipvs (0 to leave it as it is).")
	fs.DurationVar(&o.DrainLimit, "ipvs-drain-limit", ipvs.DefaultDrainLimit,
		"Maximum time that TCP connections to a removed backend may last, for --programmer=ipvs.")
}

func (o *IPVSOptions) validate() error {
	if !slices.Contains(ipvs.Schedulers(), o.Scheduler) {
		return fmt.Errorf("--ipvs-scheduler is %q: use one of %s", o.Scheduler, strings.Join(ipvs.Schedulers(), ", "))
	}
	if _, err := parsePrefixes(o.ExcludeCIDRs); err != nil {
		return fmt.Errorf("--ipvs-exclude-cidrs: %w", err)
	}
	for name, d := range map[string]time.Duration{"tcp": o.TCPTimeout, "tcpfin": o.TCPFinTimeout, "udp": o.UDPTimeout} {
		if d < 0 || d%time.Second != 0 {
			return fmt.Errorf("--ipvs-%s-timeout is %v: use whole seconds, or 0 to leave the timeout as it is", name, d)
		}
	}
	if o.DrainLimit <= 0 {
		return fmt.Errorf("--ipvs-drain-limit is %v: use a positive duration", o.DrainLimit)
	}
	return nil
}

// chosen is the programmer that a node uses.
type chosen struct {
	programmer.Programmer
	name string
	// reason says to operators why this programmer was chosen.
	reason string
}

// choose returns the first of the allowed programmers that works on this machine. Each is probed by
// doing in the kernel, without effect, what it will have to do later. Without the privileges for
// that, no programmer works.
func (o *Options) choose(ctx context.Context, logger *slog.Logger, out io.Writer) (*chosen, error) {
	return choose(ctx, o.Programmer, o.ProgrammerFallback, logger, func(name string) (programmer.Programmer, error) {
		return patiently(ctx, logger, name, func() (programmer.Programmer, error) { return o.newProgrammer(name, logger, out) })
	})
}

// A probe that fails for want of memory, or because a signal interrupts it, says nothing about the
// kernel. It is repeated this often.
const (
	probeAttempts = 20
	probeInterval = 500 * time.Millisecond
)

// patiently returns what newProgrammer returns, unless that is an error that may pass. Then it
// tries again until ctx ends.
func patiently(
	ctx context.Context, logger *slog.Logger, name string, newProgrammer func() (programmer.Programmer, error),
) (p programmer.Programmer, err error) {
	for attempt := range probeAttempts {
		if p, err = newProgrammer(); err == nil || !passes(err) {
			return p, err
		}
		if attempt == 0 {
			logger.Warn("Cannot find out yet whether a programmer can be used, trying again", "programmer", name, "err", err)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(probeInterval):
		}
	}
	return p, err
}

// passes reports whether an error is about the machine's present state and not about what its
// kernel supports.
func passes(err error) bool {
	return slices.ContainsFunc([]unix.Errno{unix.EINTR, unix.EAGAIN, unix.ENOBUFS, unix.ENOMEM, unix.EMFILE, unix.ENFILE},
		func(passing unix.Errno) bool { return errors.Is(err, passing) })
}

// choose returns the first of the candidates for which newProgrammer succeeds. It tries no further
// one once ctx has ended.
func choose(
	ctx context.Context, wanted string, fallback bool, logger *slog.Logger,
	newProgrammer func(name string) (programmer.Programmer, error),
) (*chosen, error) {
	names, asked := candidates[wanted], "--programmer="+wanted
	if !fallback && wanted != programmerAuto {
		names = names[:1]
	}
	var missing []error
	for _, name := range names {
		p, err := newProgrammer(name)
		if err != nil && ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err != nil {
			missing = append(missing, fmt.Errorf("%s cannot be used: %w", name, err))
			continue
		}
		c := &chosen{p, name, asked}
		switch {
		case len(missing) > 0:
			c.reason = asked + ", but " + oneLine(errors.Join(missing...))
		case wanted == programmerAuto:
			c.reason = asked + ", and the kernel supports it"
		}
		switch {
		case len(missing) > 0 && wanted == programmerAuto:
			logger.Warn("Using another programmer than the usual one", "programmer", name, "reason", c.reason)
		case len(missing) > 0:
			logger.Warn("Using another programmer than configured; set --programmer-fallback=false to make this an "+
				"error",
				"programmer", name, "reason", c.reason)
		}
		return c, nil
	}
	err := errors.Join(missing...)
	if len(names) < len(candidates[wanted]) {
		err = fmt.Errorf("%w; set --programmer-fallback to use another programmer: %s", err,
			strings.Join(candidates[wanted][1:], ", "))
	}
	return nil, fmt.Errorf("%s: %w", asked, err)
}

func (o *Options) newProgrammer(name string, logger *slog.Logger, out io.Writer) (programmer.Programmer, error) {
	switch name {
	case programmerPrinter:
		return printer.New(out), nil
	case programmerShadow:
		return verify.NewShadow(verify.ShadowOptions{
			Settle: shadowSettle, Beside: o.kubeProxyExpected(), MasqueradeMark: 1 << o.Node.MasqueradeBit, Period: shadowPeriod, Logger: logger, Registerer: o.Registry,
		}), nil
	case programmerNFTables:
		p, err := nftables.New(o.nftables(logger))
		return o.takeOver(name, p, err, logger)
	case programmerIPVS:
		p, err := ipvs.New(o.ipvs(logger))
		return o.takeOver(name, p, err, logger)
	}
	p, err := iptables.New(o.iptables(logger))
	return o.takeOver(name, p, err, logger, takeover.Other{
		Name: "the other variant of iptables", Cleanup: p.RetireOtherVariant, Serves: p.OtherVariantServes,
	})
}

// takeOver returns p, extended to remove what the other programmers have left once p has completed
// its work. more are others that only p has. If err is not nil, takeOver returns it.
func (o *Options) takeOver(
	name string, p programmer.Monitor, err error, logger *slog.Logger, more ...takeover.Other,
) (programmer.Programmer, error) {
	if err != nil {
		return nil, err
	}
	others := []takeover.Other{
		{Name: programmerNFTables, Cleanup: nftables.Cleanup, Serves: nftables.Serves},
		// If the other programmers lack an IP family, the kernel lacks it. So iptables cannot have
		// served it either.
		{Name: programmerIPTables, Cleanup: func(ctx context.Context) error {
			return iptables.Retire(ctx, o.iptables(logger))
		}},
		{Name: programmerIPVS, Cleanup: (&ipvs.Retirement{Limit: o.IPVS.DrainLimit}).Step, Serves: ipvs.Serves},
	}
	others = slices.DeleteFunc(others, func(o takeover.Other) bool { return o.Name == name })
	return takeover.New(p, append(others, more...), logger), nil
}

func (o *Options) nftables(logger *slog.Logger) nftables.Options {
	return nftables.Options{MasqueradeMark: 1 << o.Node.MasqueradeBit, Log: logger}
}

func (o *Options) iptables(logger *slog.Logger) iptables.Options {
	return iptables.Options{
		Variant: iptablesVariants[o.IPTablesVariant], MasqueradeMark: 1 << o.Node.MasqueradeBit,
		Metrics: o.iptablesMetrics, Log: logger,
	}
}

func (o *Options) ipvs(logger *slog.Logger) ipvs.Options {
	excluded, _ := parsePrefixes(o.IPVS.ExcludeCIDRs) // validate has checked them
	return ipvs.Options{
		Scheduler: o.IPVS.Scheduler, StrictARP: o.IPVS.StrictARP, ExcludeCIDRs: excluded, DrainLimit: o.IPVS.DrainLimit,
		TCPTimeout: o.IPVS.TCPTimeout, TCPFinTimeout: o.IPVS.TCPFinTimeout, UDPTimeout: o.IPVS.UDPTimeout,
		MasqueradeMark: 1 << o.Node.MasqueradeBit, Log: logger,
	}
}

// oneLine returns the text of an error in one line. errors.Join puts each error on a line of its
// own.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// observe exports the choice as a metric.
func (c *chosen) observe(registerer prometheus.Registerer) {
	promauto.With(registerer).NewGaugeVec(prometheus.GaugeOpts{
		Namespace: "slicecast", Subsystem: "agent", Name: "programmer_info",
		Help: "Always 1, with the programmer in use and the reason for its choice as labels.",
	}, []string{"programmer", "reason"}).WithLabelValues(c.name, c.reason).Set(1)
}

const (
	// shadowSettle is how long a difference lasts before a shadow reports it. kube-proxy may need
	// some seconds for a change.
	shadowSettle = 20 * time.Second
	shadowPeriod = time.Minute
)

// programsNothing reports whether the programmer leaves the machine alone.
func (o *Options) programsNothing() bool {
	return o.Programmer == programmerPrinter || o.Programmer == programmerShadow
}

// prepareKernel applies the settings of the kernel that the programmer needs and that only a
// privileged container can make. If that fails, everything works that does not need them.
func (o *Options) prepareKernel(ctx context.Context, logger *slog.Logger) {
	v, err := o.Node.view(o.NodeName)
	// Without a Node, the view has no primary addresses. That does not matter here, because
	// loopback addresses are never primary.
	localhost := err == nil && view.New(v).State().Node.LocalhostNodePorts
	if o.programsNothing() || !localhost && o.Programmer != programmerIPVS {
		return
	}
	c, err := o.choose(ctx, logger, io.Discard)
	switch {
	case ctx.Err() != nil:
		return
	case err != nil:
	case c.name == programmerIPVS:
		err = ipvs.SetSysctls(o.ipvs(logger))
	case !localhost:
	case c.name == programmerNFTables:
		err = nftables.RouteLocalnet(o.nftables(logger))
	default:
		err = iptables.RouteLocalnet(ctx, o.iptables(logger))
	}
	if err != nil {
		logger.Error("Cannot set the kernel parameters that the programmer needs; NodePorts on loopback addresses, "+
			"or Services with IPVS, will not work", "err", err)
	}
}
