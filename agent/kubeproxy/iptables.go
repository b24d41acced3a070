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

// cleanupIPTables removes kube-proxy's chains, and the rules that lead to them, in both variants.
// It skips a variant whose programs the machine lacks, because kube-proxy cannot have used it.
func cleanupIPTables(ctx context.Context) error {
	var errs []error
	for _, family := range []string{"iptables", "ip6tables"} {
		// The name without a variant is mostly one of the other two, for which nothing is left then.
		for _, variant := range []string{"-nft", "-legacy", ""} {
			name := family + variant
			if _, err := exec.LookPath(name + "-save"); err != nil {
				continue
			}
			if err := cleanupVariant(ctx, name); err != nil {
				errs = append(errs, fmt.Errorf("remove kube-proxy's chains with %s: %w", name, err))
			}
		}
	}
	return errors.Join(errs...)
}

func cleanupVariant(ctx context.Context, name string) error {
	// Asking for a table by its name would make the legacy variant load that table.
	rules, err := run(ctx, nil, name+"-save")
	if err != nil || !bytes.Contains(rules, []byte("KUBE-")) {
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
	err := cmd.Run()
	said := strings.TrimSpace(stderr.String())
	switch {
	case err == nil:
		return stdout.Bytes(), nil
	case strings.Contains(said, "not supported") || strings.Contains(said, "do you need to insmod?"):
		return nil, nil // the kernel lacks the variant, so there is nothing to remove
	}
	return nil, fmt.Errorf("%s: %w: %s", name, err, said)
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
