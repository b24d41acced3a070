// Package previous builds programs of earlier commits, for tests of what works together.
package previous

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"k8s.io/apimachinery/pkg/util/version"
)

// Release returns the tag of the highest release before the current commit of the repository in
// dir. Release candidates and tags of the current commit itself do not count. It returns "" if
// nothing has been released before.
func Release(ctx context.Context, dir string) (string, error) {
	own, err := git(ctx, dir, "tag", "--points-at", "HEAD")
	if err != nil {
		return "", err
	}
	merged, err := git(ctx, dir, "tag", "--merged", "HEAD", "--list", "v[0-9]*")
	if err != nil {
		return "", err
	}
	skip := make(map[string]bool)
	for _, tag := range own {
		skip[tag] = true
	}
	var highest *version.Version
	var release string
	for _, tag := range merged {
		v, err := version.ParseSemantic(tag)
		if err != nil || v.PreRelease() != "" || skip[tag] || highest != nil && v.LessThan(highest) {
			continue
		}
		highest, release = v, tag
	}
	return release, nil
}

func git(ctx context.Context, dir string, args ...string) (words []string, err error) {
	cmd := exec.CommandContext(ctx, "git", args...)
	cmd.Dir, cmd.Stderr = dir, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("git %s in %s: %w: run it in a clone of the repository", strings.Join(args, " "), dir, err)
	}
	return strings.Fields(string(out)), nil
}

// Build builds the server and the agent of a commit of the repository in dir, unless they are in
// the cache, and returns the folder of the programs.
func Build(ctx context.Context, dir, commit string) (bin string, err error) {
	cmd := exec.CommandContext(ctx, "internal/tools/commit.sh", commit)
	cmd.Dir, cmd.Stderr = dir, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("build %s (see the output): %w", commit, err)
	}
	return filepath.Join(strings.TrimSpace(string(out)), "bin"), nil
}
