package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// daemonPackage is the package with the variables release and commit, which --version prints.
const daemonPackage = "github.com/slicecast/slicecast/internal/daemon"

// platform is an operating system and an architecture, as Go names them.
type platform struct{ os, architecture string }

// programs builds commands, each of them once for a platform.
type programs struct {
	release release
	dir     string
}

// newPrograms returns the programs of a release. remove removes them.
func newPrograms(r release) (p *programs, remove func(), err error) {
	dir, err := os.MkdirTemp("", "slicecast-release-")
	if err != nil {
		return nil, nil, err
	}
	// A temporary folder that stays does no harm.
	return &programs{r, dir}, func() { _ = os.RemoveAll(dir) }, nil
}

// build builds the command in a folder of the repository and returns the path of the program.
// Settings of this machine do not take part. Neither does git's folder, because Go records the
// commit only from some kinds of clones.
func (p *programs) build(ctx context.Context, folder string, on platform) (program string, err error) {
	name := filepath.Base(folder)
	if filepath.Dir(folder) == "." {
		name = "slicecast-" + name
	}
	if on.os == "windows" {
		name += ".exe"
	}
	program = filepath.Join(p.dir, on.os, on.architecture, name)
	if _, err := os.Stat(program); err == nil {
		return program, nil
	}
	progress("building %s for %s/%s", name, on.os, on.architecture)
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false",
		fmt.Sprintf("-ldflags=-s -w -X %[1]s.release=%[2]s -X %[1]s.commit=%[3]s", daemonPackage, p.release.version,
			p.release.revision), "-o", program, "./"+folder)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS="+on.os, "GOARCH="+on.architecture, "GOAMD64=v1", "GOARM64=v8.0",
		"GOFLAGS=", "GOEXPERIMENT=", "GOWORK=off")
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("go build ./%s for %s/%s: %w", folder, on.os, on.architecture, err)
	}
	return program, nil
}
