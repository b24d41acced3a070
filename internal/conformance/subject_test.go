// This file says what the runner needs from a subject, which is an agent on a node, and which
// variants of a subject there are.
package conformance

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// subject is an agent on a node with which cases are played.
type subject interface {
	// Name returns a description of the subject.
	Name() string
	// Mode returns the mode in which the subject implements Services.
	Mode() Mode
	// Reference reports whether the subject is kube-proxy, whose behavior in each mode is the
	// expected one.
	Reference() bool
	// Start starts the subject. It does not wait until the subject is ready.
	Start(settings) error
	// Stop ends the subject, whose rules stay. It has no effect if the subject is not running.
	Stop() error
	// Check returns an error if the subject is not running.
	Check() error
	// Flush removes the subject's rules without its knowledge.
	Flush(ctx context.Context, s *stage) error
}

// variants maps the names of variants to their modes and, for mode iptables, to the variant of the
// iptables commands.
var variants = map[string]struct {
	mode     Mode
	iptables string
}{
	"ipvs": {IPVS, ""}, "nftables": {NFTables, ""}, "iptables-nft": {IPTables, "nft"}, "iptables-legacy": {IPTables, "legacy"},
}

// eachVariant runs a test for each variant in a comma-separated list.
func eachVariant(t *testing.T, list string, f func(t *testing.T, mode Mode, iptables string)) {
	t.Helper()
	for name := range strings.SplitSeq(list, ",") {
		if name == "" {
			continue
		}
		v, ok := variants[name]
		if !ok {
			t.Errorf("unknown variant %q", name)
			continue
		}
		t.Run(name, func(t *testing.T) { f(t, v.mode, v.iptables) })
	}
}

// flush removes all rules that a subject may have made.
func flush(ctx context.Context, s *stage, iptables string) error {
	if iptables != "" {
		return s.flush(ctx, iptables)
	}
	_, err := s.node.Run(ctx, "nft", "flush", "ruleset")
	return err
}

// iptablesCommands returns a folder for PATH in which the iptables commands are those of a variant.
func iptablesCommands(t *testing.T, variant string) (string, error) {
	t.Helper()
	dir := t.TempDir()
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			target, err := lookPath(family + "-" + variant + suffix)
			if err != nil {
				return "", err
			}
			if err := os.Symlink(target, filepath.Join(dir, family+suffix)); err != nil {
				return "", err
			}
		}
	}
	return dir, nil
}

func lookPath(name string) (string, error) {
	for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
		path, err := filepath.EvalSymlinks(filepath.Join(dir, name))
		if err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s is not in PATH", name)
}
