package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"

	goiptables "github.com/coreos/go-iptables/iptables"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/xtables"
)

// lockSeconds is how long a program waits for the xtables lock, which the legacy variant takes for
// each change. Loading the rules of a large cluster holds it for a few seconds at most.
const lockSeconds = 10

// tool runs the programs of one variant and family.
type tool struct {
	family  model.Family
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

func newTool(family model.Family, variant Variant, run runner) (*tool, error) {
	name := programName(family, variant)
	base, err := goiptables.New(goiptables.Path(name), goiptables.Timeout(lockSeconds))
	if err != nil {
		return nil, err
	}
	for _, program := range []string{name + "-save", name + "-restore"} {
		if _, err := exec.LookPath(program); err != nil {
			return nil, err
		}
	}
	t := &tool{family: family, base: base, name: name, variant: Legacy, run: run}
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

// errNoFamily reports that the kernel lacks what a program needs for an IP family. That will not
// change, unlike a program that failed once.
var errNoFamily = errors.New("the kernel does not support it")

// probe returns an error if the program does not work. A program that cannot print a table works,
// as long as the kernel has that table: others have rules there that the program does not know, and
// what it says concerns only these.
func (t *tool) probe(ctx context.Context) error {
	_, err := t.save(ctx, "-t", nat.String())
	command := (*commandError)(nil)
	if !errors.As(err, &command) {
		return err
	}
	exists, errKernel := t.exists(nat)
	switch {
	case errKernel != nil:
		return errors.Join(err, errKernel)
	case exists && t.variant == NFT:
		return nil
	case !exists && command.unsupported():
		return fmt.Errorf("%w: %w", errNoFamily, err)
	}
	return err
}

// exists reports whether the kernel has a table.
func (t *tool) exists(table table) (exists bool, err error) {
	if t.variant == Legacy {
		return xtables.HasLegacy(t.family, table.String())
	}
	err = withTable(t.family, table, func(c *nft.Conn, of nft.Table) error {
		tables, err := c.Tables(of.Family)
		_, exists = tables[of.Name]
		return err
	})
	return exists, err
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

// saved reads what the kernel holds of this package. hooks are those that it should hold.
func (t *tool) saved(ctx context.Context, hooks []hook) (saved, error) {
	s := saved{chains: newChainHashes()}
	return s, t.read(ctx, hooks, &s)
}

// read adds what the kernel holds of this package to s.
func (t *tool) read(ctx context.Context, hooks []hook, s *saved) error {
	for table := range tables {
		output, err := t.save(ctx, "-t", table.String())
		if t.variant == Legacy || err == nil && bytes.Contains(output, []byte("*"+table.String()+"\n")) {
			if err != nil {
				return err
			}
			s.parse(output)
			continue
		}
		// A table that does not exist is not printed, and neither is one with rules that the program
		// does not know.
		exists, errRead := t.readChains(ctx, table, hooks, s)
		if errRead != nil {
			return errRead
		}
		if err != nil && !exists {
			return err
		}
	}
	return nil
}

// maxLists limits the attempts to list chains of a table that cannot be printed as a whole.
const maxLists = 64

// readChains adds what a table of nf_tables holds to s, chain by chain. The kernel says which
// chains there are, and the program prints each that it can print. exists reports whether the table
// exists.
func (t *tool) readChains(ctx context.Context, table table, hooks []hook, s *saved) (exists bool, err error) {
	var names []string
	var refs []nft.Reference
	err = withTable(t.family, table, func(c *nft.Conn, of nft.Table) error {
		names, refs, exists, err = c.FindChains(of, isOwn)
		return err
	})
	if err != nil || len(names) == 0 {
		return exists, err
	}
	for _, name := range names {
		s.chains[table][name] = unknownChain
	}
	list := func(chains []string) error {
		input := "*" + table.String() + "\n-S " + strings.Join(chains, "\n-S ") + "\nCOMMIT\n"
		output, err := t.run(ctx, []byte(input), t.name+"-restore", "--noflush")
		if err != nil {
			return restoreError(err, nil)
		}
		s.parse([]byte("*" + table.String() + "\n" + listed.ReplaceAllString(string(output), ":$1 -")))
		return nil
	}
	left := maxLists
	if err := divide(names, &left, list, func(string, error) {}); err != nil {
		return exists, err
	}
	s.refs[table] = []reference{}
	for chain, refs := range byChain(refs) {
		left, printed := 1, true
		if err := divide([]string{chain}, &left, list, func(string, error) { printed = false }); err != nil {
			return exists, err
		}
		for _, r := range refs {
			at := slices.IndexFunc(hooks, func(h hook) bool { return h.table == table && h.chain() == chain && h.target() == r.Target })
			unsure := false
			if !printed && at >= 0 {
				args := append([]string{"-t", table.String(), "-C"}, strings.Fields(hooks[at].rule)[1:]...)
				if _, err := t.run(ctx, nil, t.name, args...); ctx.Err() != nil {
					return exists, err
				} else if unsure = err != nil; !unsure {
					s.hooks = append(s.hooks, hooks[at])
				}
			}
			s.refs[table] = append(s.refs[table], reference{r, unsure})
		}
	}
	return exists, nil
}

// listed matches what the program prints of a chain before its rules.
var listed = regexp.MustCompile(`(?m)^-N (\S+)$`)

// unknownChain describes a chain whose rules cannot be read. No chain that is wanted is like it.
var unknownChain = chainHash{}

// byChain divides references by the chain that they are in.
func byChain(refs []nft.Reference) map[string][]nft.Reference {
	by := map[string][]nft.Reference{}
	for _, r := range refs {
		by[r.Chain] = append(by[r.Chain], r)
	}
	return by
}

// isOwn reports whether a chain belongs to this package.
func isOwn(chain string) bool { return strings.HasPrefix(chain, ChainPrefix) }

// withTable calls use with a socket, and with the table of nf_tables that iptables uses.
func withTable(family model.Family, t table, use func(*nft.Conn, nft.Table) error) error {
	c, err := nft.Dial()
	if err != nil {
		return err
	}
	defer c.Close()
	if err := use(c, nft.Table{Family: nft.FamilyOf(family), Name: t.String()}); err != nil {
		return fmt.Errorf("table %v of nf_tables for %v: %w", t, family, err)
	}
	return nil
}

// removeRefs removes rules of others' chains that lead to chains of this package.
func (t *tool) removeRefs(table table, refs []nft.Reference) error {
	if len(refs) == 0 {
		return nil
	}
	t.commits++
	return withTable(t.family, table, func(c *nft.Conn, of nft.Table) error { return c.RemoveReferences(of, refs) })
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
