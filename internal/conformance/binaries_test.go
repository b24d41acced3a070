package conformance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

// The commands, as make build calls them.
const (
	serverCommand = "slicecast-server"
	agentCommand  = "slicecast-agent"
)

// buildDirVariable names the folder that the commands were built into.
const buildDirVariable = "SLICECAST_CONFORMANCE_BUILD"

// buildCommands builds the commands, unless they are where ready-made binaries are.
func buildCommands() error {
	if os.Getenv(controlplane.BinariesVariable) != "" {
		return nil
	}
	dir, err := os.MkdirTemp("", "slicecast-conformance-")
	if err != nil {
		return err
	}
	for name, folder := range map[string]string{serverCommand: "server", agentCommand: "agent"} {
		cmd := exec.CommandContext(context.Background(), "go", "build", "-o", filepath.Join(dir, name), "./"+folder)
		cmd.Dir = filepath.Join("..", "..")
		cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("build %s: %w", name, err)
		}
	}
	return os.Setenv(buildDirVariable, dir)
}

// takeCommands moves what buildCommands has built to where nothing remains of it when this process is killed: a tmpfs.
func takeCommands() error {
	dir := os.Getenv(buildDirVariable)
	if dir == "" {
		return nil
	}
	to, err := os.MkdirTemp("/run", "slicecast-conformance-")
	if err != nil {
		return err
	}
	if err := os.CopyFS(to, os.DirFS(dir)); err != nil {
		return err
	}
	return errors.Join(os.Setenv(buildDirVariable, to), os.RemoveAll(dir))
}

// command is the path of one of the commands.
func command(name string) string {
	return filepath.Join(cmp.Or(os.Getenv(buildDirVariable), os.Getenv(controlplane.BinariesVariable)), name)
}
