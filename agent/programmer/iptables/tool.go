package iptables

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"strconv"
	"strings"

	goiptables "github.com/coreos/go-iptables/iptables"

	"github.com/slicecast/slicecast/internal/model"
)

// lockSeconds is how long a program waits for the xtables lock, which the legacy variant takes for
// each change. Loading the rules of a large cluster holds it for a few seconds at most.
const lockSeconds = 10

// tool runs the programs of one variant and family.
type tool struct {
	base    *goiptables.IPTables
	name    string
	variant Variant // NFT or Legacy
	run     runner
	// commits counts the transactions, each of which changes one table. The caller resets it.
	commits int
}

// programName returns the name of the main program of a family and variant. The names of the other
// programs begin with it.
func programName(family model.Family, variant Variant) string {
	name := "iptables"
	if family == model.IPv6 {
		name = "ip6tables"
	}
	if variant != "" {
		name += "-" + string(variant)
	}
	return name
}

func newTool(name string, run runner) (*tool, error) {
	base, err := goiptables.New(goiptables.Path(name), goiptables.Timeout(lockSeconds))
	if err != nil {
		return nil, err
	}
	for _, program := range []string{name + "-save", name + "-restore"} {
		if _, err := exec.LookPath(program); err != nil {
			return nil, err
		}
	}
	t := &tool{base: base, name: name, variant: Legacy, run: run}
	// Programs from before there were two variants do not report one, and are legacy.
	version, err := run(context.Background(), nil, name, "--version")
	if err != nil {
		return nil, err
	}
	if bytes.Contains(version, []byte("nf_tables")) {
		t.variant = NFT
	}
	return t, nil
}

// modern reports whether it is iptables 1.6.2 or newer, which added --random-fully and
// iptables-restore's --wait.
func (t *tool) modern() bool { return t.base.HasRandomFully() }

// version returns the version, for example "1.8.9".
func (t *tool) version() string {
	major, minor, patch := t.base.GetIptablesVersion()
	return fmt.Sprintf("%d.%d.%d", major, minor, patch)
}

// save returns the rules of all tables in use, or those that the arguments select.
func (t *tool) save(ctx context.Context, args ...string) ([]byte, error) {
	return t.run(ctx, nil, t.name+"-save", args...)
}

// saved reads what the kernel holds of this package.
func (t *tool) saved(ctx context.Context) (saved, error) {
	s := saved{chains: newChainHashes()}
	return s, t.read(ctx, &s)
}

// read adds what the kernel holds of this package to s.
func (t *tool) read(ctx context.Context, s *saved) error {
	for table := range tables {
		output, err := t.save(ctx, "-t", table.String())
		if err != nil {
			return err
		}
		s.parse(output)
	}
	return nil
}

// try writes rules of checkChain and removes them again, in one table after the other. The error is
// a rejectedError only if the rules were refused.
func (t *tool) try(ctx context.Context, rules *[tables]bytes.Buffer) error {
	var input bytes.Buffer
	for table := range tables {
		fmt.Fprintf(&input, "*%v\n:%s - [0:0]\n%sCOMMIT\n", table, checkChain, rules[table].Bytes())
		fmt.Fprintf(&input, "*%v\n:%s - [0:0]\n-X %s\nCOMMIT\n", table, checkChain, checkChain)
	}
	return t.restore(ctx, input.Bytes())
}

// restore changes the chains that the input declares, if it is not empty. Each table changes at
// once. The error is a rejectedError if the input was refused.
func (t *tool) restore(ctx context.Context, input []byte) error {
	if len(input) == 0 {
		return nil
	}
	args := []string{"--noflush"}
	if t.modern() {
		args = append(args, "--wait", strconv.Itoa(lockSeconds))
	}
	if _, err := t.run(ctx, input, t.name+"-restore", args...); err != nil {
		return restoreError(err, input)
	}
	t.commits += bytes.Count(input, []byte("\nCOMMIT\n"))
	return nil
}

// hook inserts a rule at the head of a chain of others. With newChain, it first creates the chain
// that the rule leads to, without rules.
func (t *tool) hook(h hook, newChain bool) error {
	if newChain {
		if err := t.base.NewChain(h.table.String(), h.target()); err != nil {
			return lockAdvice(fmt.Errorf("add the chain %s to table %v: %w", h.target(), h.table, err))
		}
		t.commits++
	}
	words := strings.Fields(h.rule)
	if err := t.base.Insert(h.table.String(), words[1], 1, words[2:]...); err != nil {
		return lockAdvice(fmt.Errorf("add the rule %q to table %v: %w", h.rule, h.table, err))
	}
	t.commits++
	return nil
}
