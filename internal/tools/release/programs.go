package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
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

// passed are the variables of this process that the compiler needs, and that do not change what it
// writes: where programs and temporary files are, and how to reach a server of modules. go.sum says
// what modules have to contain.
var passed = []string{
	"PATH", "HOME", "TMPDIR", "USERPROFILE", "SSL_CERT_FILE", "SSL_CERT_DIR",
	"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
}

// asked are Go's settings, set by a variable or by `go env -w`, that say where modules come from
// and where Go keeps what it has made. They do not change what it writes, either.
var asked = []string{"GOCACHE", "GOMODCACHE", "GOPATH", "GOPROXY", "GONOPROXY", "GOAUTH"}

// environment returns the environment of the compiler for a platform. It is complete: no setting of
// this machine takes part that could change a program. The version of Go is that of this program,
// which the provenance names.
func environment(ctx context.Context, on platform) ([]string, error) {
	all := []string{
		"GOENV=off", "GOTOOLCHAIN=" + strings.Fields(runtime.Version())[0], "GOFLAGS=-mod=readonly", "GOWORK=off", "GO111MODULE=on",
		"GOOS=" + on.os, "GOARCH=" + on.architecture, "GOAMD64=v1", "GOARM64=v8.0", "CGO_ENABLED=0",
		"GOEXPERIMENT=", "GOFIPS140=off", "GODEBUG=",
	}
	for _, name := range passed {
		if value, ok := os.LookupEnv(name); ok {
			all = append(all, name+"="+value)
		}
	}
	out, err := exec.CommandContext(ctx, "go", append([]string{"env"}, asked...)...).Output()
	if err != nil {
		return nil, fmt.Errorf("go env: %w", err)
	}
	values := strings.Split(strings.TrimSuffix(string(out), "\n"), "\n")
	if len(values) != len(asked) {
		return nil, fmt.Errorf("go env has printed %d values instead of %d: use the version of Go in go.mod", len(values), len(asked))
	}
	for i, name := range asked {
		all = append(all, name+"="+values[i])
	}
	return all, nil
}

// build builds the command in a folder of the repository and returns the path of the program.
// git's folder does not take part, because Go records the commit only from some kinds of clones.
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
	cmd.Dir = p.release.sources
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if cmd.Env, err = environment(ctx, on); err == nil {
		err = cmd.Run()
	}
	if err != nil {
		return "", fmt.Errorf("go build ./%s for %s/%s: %w", folder, on.os, on.architecture, err)
	}
	return program, nil
}
