// These tests prove which tag is the release before the current commit, in real repositories.
package previous

import (
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestRelease(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("GIT_CONFIG_GLOBAL", os.DevNull)
	shell := func(script string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "sh", "-e", "-c", script)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, string(out))
	}
	release := func() string {
		t.Helper()
		tag, err := Release(t.Context(), dir)
		require.NoError(t, err)
		return tag
	}
	commit := "git commit -q --allow-empty -m x; "
	shell("git init -q -b main .; git config user.name x; git config user.email x@example.com; " + commit)
	require.Empty(t, release())
	shell("git tag v0.1.0")
	require.Empty(t, release(), "the tag is the current commit's own")
	shell(commit)
	require.Equal(t, "v0.1.0", release())
	shell("git tag vendor; git tag v2; " + commit)
	require.Equal(t, "v0.1.0", release(), "other tags are no releases")
	shell("git tag v0.9.0; " + commit + "git tag v0.10.0; " + commit + "git tag v0.11.0-rc.1; " + commit)
	require.Equal(t, "v0.10.0", release(), "by number, and without candidates")
	shell("git switch -q -c fix v0.9.0; git commit -q --allow-empty -m fix; git tag v0.9.1; " + commit)
	require.Equal(t, "v0.9.1", release(), "of this branch")
	_, err := Release(t.Context(), t.TempDir())
	require.ErrorContains(t, err, "run it in a clone")
}
