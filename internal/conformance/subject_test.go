package conformance

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// subject is what cases are played against: an agent on a node.
type subject interface {
	// Name says what it is.
	Name() string
	// Mode is how it carries out Services.
	Mode() Mode
	// Reference tells whether it is kube-proxy, of which nothing is expected but what it does.
	Reference() bool
	// Start starts it, and returns while it may not be ready yet.
	Start(settings) error
	// Stop ends it; its rules stay. It does nothing if the subject does not run.
	Stop() error
	// Check returns an error if it does not run.
	Check() error
	// Flush removes its rules behind its back.
	Flush(ctx context.Context, s *stage) error
}

// variants of subjects are modes, for iptables with the variant of its commands.
var variants = map[string]struct {
	mode     Mode
	iptables string
}{
	"ipvs": {IPVS, ""}, "nftables": {NFTables, ""}, "iptables-nft": {IPTables, "nft"}, "iptables-legacy": {IPTables, "legacy"},
}

// eachVariant runs a test for each variant of a list.
func eachVariant(t *testing.T, list string, f func(t *testing.T, mode Mode, iptables string)) {
	t.Helper()
	for name := range strings.SplitSeq(list, ",") {
		if name == "" {
			continue
		}
		v, ok := variants[name]
		if !ok {
			t.Errorf("there is no %q", name)
			continue
		}
		t.Run(name, func(t *testing.T) { f(t, v.mode, v.iptables) })
	}
}

// flush removes the rules that a subject may have made.
func flush(ctx context.Context, s *stage, iptables string) error {
	if iptables != "" {
		return s.flush(ctx, iptables)
	}
	_, err := s.node.Run(ctx, "nft", "flush", "ruleset")
	return err
}

// iptablesCommands makes a folder for PATH in which the commands are those of a variant.
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
