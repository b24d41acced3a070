// This file builds slicecast-server and slicecast-agent for the cases, unless ready-made binaries
// are provided.
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

// The names of the commands, as "make build" builds them.
const (
	serverCommand = "slicecast-server"
	agentCommand  = "slicecast-agent"
)

// buildDirVariable is the name of an environment variable with the folder of the built commands.
const buildDirVariable = "SLICECAST_CONFORMANCE_BUILD"

// buildCommands builds the commands, unless ready-made binaries are provided.
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

// takeCommands moves the built commands to a tmpfs, so that nothing is left behind when this
// process is killed.
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

// command returns the path of one of the commands.
func command(name string) string {
	return filepath.Join(cmp.Or(os.Getenv(buildDirVariable), os.Getenv(controlplane.BinariesVariable)), name)
}
