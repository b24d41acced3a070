package kubeproxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/xtables"
)

// chains contains the names of the chains that kube-proxy has in its modes iptables and ipvs
// (k8s.io/kubernetes/pkg/proxy, 1.32 to 1.37). serviceChain matches the names of the chains for
// single Services, which end with the beginning of a SHA-256 sum in base 32.
var (
	chains = []string{
		"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", "KUBE-MARK-MASQ", "KUBE-FORWARD",
		"KUBE-PROXY-FIREWALL", "KUBE-PROXY-CANARY",
		"KUBE-NODE-PORT", "KUBE-LOAD-BALANCER", "KUBE-SOURCE-RANGES-FIREWALL", "KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER",
	}
	serviceChain = regexp.MustCompile(`^KUBE-(SVC|SVL|EXT|FW|SEP)-[A-Z2-7]{16}$`)
)

func isKubeProxys(chain string) bool {
	return slices.Contains(chains, chain) || serviceChain.MatchString(chain)
}

// lockSeconds is how many seconds a program waits for the xtables lock.
const lockSeconds = "10"

// tables are the tables of iptables in which kube-proxy has chains.
var tables = []string{"mangle", "nat", "filter"}

// cleanupIPTables removes kube-proxy's chains, and the rules that lead to them, in both variants.
// The kernel says which chains there are. So neither missing programs nor rules of others that a
// program does not print hide them.
func cleanupIPTables(ctx context.Context) error {
	return errors.Join(cleanupNFT(), cleanupLegacy(ctx, model.IPv4), cleanupLegacy(ctx, model.IPv6))
}

// cleanupNFT is cleanupIPTables for the variant that uses nf_tables.
func cleanupNFT() error {
	return withNFTables(func(conn *nft.Conn, family model.Family) error {
		var errs []error
		for _, table := range tables {
			if err := conn.RemoveChains(nft.Table{Family: nft.FamilyOf(family), Name: table}, isKubeProxys); err != nil {
				errs = append(errs, fmt.Errorf("remove kube-proxy's chains from the %v table %s of iptables-nft: %w",
					family, table, err))
			}
		}
		return errors.Join(errs...)
	})
}

// cleanupLegacy is cleanupIPTables for the legacy variant, which only its programs can change.
func cleanupLegacy(ctx context.Context, family model.Family) error {
	name := "iptables"
	if family == model.IPv6 {
		name = "ip6tables"
	}
	var errs []error
	for _, program := range []string{name + "-legacy", name} {
		left, err := hasLegacyChains(family)
		if err != nil || !left {
			return err
		}
		if err := cleanupVariant(ctx, program); err != nil {
			errs = append(errs, fmt.Errorf("remove kube-proxy's chains with %s: %w", program, err))
		}
	}
	left, err := hasLegacyChains(family)
	if err != nil || !left {
		return err
	}
	return errors.Join(append(errs, fmt.Errorf("kube-proxy's chains are left in legacy %s: install %s-legacy", name, name))...)
}

// hasLegacyChains reports whether kube-proxy has chains in the legacy variant.
func hasLegacyChains(family model.Family) (bool, error) {
	for _, table := range tables {
		names, err := xtables.Chains(family, table)
		if err != nil || slices.ContainsFunc(names, isKubeProxys) {
			return err == nil, err
		}
	}
	return false, nil
}

func cleanupVariant(ctx context.Context, name string) error {
	// Asking for a table by its name would make the legacy variant load that table.
	rules, err := run(ctx, nil, name+"-save")
	if err != nil {
		return err
	}
	if text := removal(rules); len(text) > 0 {
		_, err = run(ctx, text, name+"-restore", "--noflush", "--wait", lockSeconds)
	}
	return err
}

func run(ctx context.Context, stdin []byte, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin = bytes.NewReader(stdin)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%s: %w: %s", name, err, strings.TrimSpace(stderr.String()))
	}
	return stdout.Bytes(), nil
}

// removal converts the output of iptables-save to the input of iptables-restore --noflush that
// removes kube-proxy's chains. Each table changes in one step.
func removal(saved []byte) []byte {
	var out, declare, unhook, remove bytes.Buffer
	table := ""
	for line := range strings.Lines(string(saved)) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "*"):
			table = line
		case strings.HasPrefix(line, ":"):
			if chain, _, _ := strings.Cut(line[1:], " "); isKubeProxys(chain) {
				// Declaring a chain empties it, so none of the removed chains refers to another.
				fmt.Fprintf(&declare, ":%s - [0:0]\n", chain)
				fmt.Fprintf(&remove, "-X %s\n", chain)
			}
		case strings.HasPrefix(line, "-A "):
			if chain, _, _ := strings.Cut(line[3:], " "); !isKubeProxys(chain) && isKubeProxys(target(line)) {
				fmt.Fprintf(&unhook, "-D %s\n", line[3:])
			}
		case line == "COMMIT":
			if declare.Len() > 0 {
				fmt.Fprintf(&out, "%s\n%s%s%sCOMMIT\n", table, declare.Bytes(), unhook.Bytes(), remove.Bytes())
			}
			declare.Reset()
			unhook.Reset()
			remove.Reset()
		}
	}
	return out.Bytes()
}

var quoted = regexp.MustCompile(`"(\\.|[^"\\])*"`)

// target returns the chain that a rule leads to, or "" if there is none.
func target(rule string) string {
	words := strings.Fields(quoted.ReplaceAllString(rule, `""`)) // a comment may contain anything
	for i, word := range words[:len(words)-1] {
		if word == "-j" || word == "-g" {
			return words[i+1]
		}
	}
	return ""
}
