package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/programmer/iptables"
	"github.com/slicecast/slicecast/agent/programmer/ipvs"
	"github.com/slicecast/slicecast/agent/programmer/nftables"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/probe"
)

func newProbeKernelCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "kernel",
		Short: "Try which programmers can work here, and print a JSON object",
		Long: `kernel tries nftables, both variants of iptables, and IPVS in the network namespace that it runs in, as an agent does
when it starts. For iptables it also writes the rules of a Service to a chain that nothing leads to, and removes them
again. It leaves no rules, but tables of iptables that did not exist stay, without rules. It needs the capabilities
NET_ADMIN and NET_RAW. "kubectl slicecast check --pre --pods" runs it in Pods of its own.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			k, err := probeKernel(c.Context())
			if err != nil {
				return err
			}
			return json.NewEncoder(c.OutOrStdout()).Encode(k)
		},
	}
}

// probeKernel tries each programmer in the network namespace of the calling thread.
func probeKernel(ctx context.Context) (k probe.Kernel, err error) {
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return k, fmt.Errorf("read the release of the kernel: %w", err)
	}
	k.Release = strings.TrimSpace(string(release))
	log := slog.New(slog.DiscardHandler)
	k.Programmers = append(k.Programmers, tried(programmerNFTables, "", func() ([]model.Family, error) {
		p, err := nftables.New(nftables.Options{Log: log})
		if err != nil {
			return nil, err
		}
		defer p.Close()
		return p.Families(), nil
	}))
	for _, variant := range []iptables.Variant{iptables.NFT, iptables.Legacy} {
		k.Programmers = append(k.Programmers, tried(programmerIPTables, string(variant), func() ([]model.Family, error) {
			p, err := iptables.New(iptables.Options{Variant: variant, Log: log})
			if err != nil {
				return nil, err
			}
			return p.Families(), p.Try(ctx)
		}))
	}
	k.Programmers = append(k.Programmers, tried(programmerIPVS, "", func() ([]model.Family, error) {
		p, err := ipvs.New(ipvs.Options{Log: log})
		if err != nil {
			return nil, err
		}
		return p.Families(), nil
	}))
	return k, nil
}

// tried returns what became of trying a programmer. try returns the families that the programmer
// has found, and FamilyErrors of those that cannot be programmed, if that is known.
func tried(name, variant string, try func() ([]model.Family, error)) probe.KernelProgrammer {
	families, err := try()
	p := probe.KernelProgrammer{Programmer: name, Variant: variant, Families: []string{}}
	_, failed := programmer.Split(err, families)
	leftOut := make(map[string]string)
	for _, f := range []model.Family{model.IPv4, model.IPv6} {
		switch {
		case failed[f] != nil:
			leftOut[f.String()] = oneLine(failed[f])
		case slices.Contains(families, f):
			p.Families = append(p.Families, f.String())
		default:
			leftOut[f.String()] = "this machine does not support it"
		}
	}
	if len(p.Families) == 0 {
		p.Error = oneLine(err)
		p.NoProgram, p.NotPermitted = errors.Is(err, exec.ErrNotFound), errors.Is(err, os.ErrPermission)
	} else if len(leftOut) > 0 {
		p.LeftOut = leftOut
	}
	return p
}
