// This file runs the command twice before the tests. The first run is in a clone with files that
// git ignores. The second one is of the same commit at another place and with other settings, as
// on another machine.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/repository"
)

// The folders of the tests are on a tmpfs that disappears with their namespaces.
const (
	firstRelease  = "/run/slicecast-release/first"
	firstBuild    = firstRelease + "/" + imagesFolder
	secondRelease = "/run/slicecast-release/second"
	clone         = "/run/slicecast-release/clone"
	otherPlace    = "/run/slicecast-release/another place"
	settingsFile  = "/run/slicecast-release/go.env"
	temporary     = "/run/slicecast-release/tmp"
	theCommand    = "/run/slicecast-release/program"
)

// testRelease is what the builds are told of their sources, and what git says of the clone.
var testRelease = release{version: "v1.2.3-test", created: time.Date(2026, 11, 25, 8, 30, 0, 0, time.UTC)}

func TestMain(m *testing.M) {
	testenv.Isolate(fetchAll)
	if err := buildTwice(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

// fetchAll fetches the packages and the modules while there still is a network.
func fetchAll() error {
	debs, err := newDebian()
	if err != nil {
		return err
	}
	for _, p := range debs.packages {
		if _, err := debs.fetch(context.Background(), p); err != nil {
			return err
		}
	}
	for _, args := range [][]string{
		{"go", "list", "-deps", "./server", "./agent", "./loadtest", "./deploy/kubectl-slicecast"},
		{"internal/tools/helm.sh", "--path"},
	} {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir, cmd.Stderr = filepath.Join("..", "..", ".."), os.Stderr
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("%s: %w", cmd, err)
		}
	}
	return nil
}

// commitSources makes two clones whose only commit has the files of the working directory. The
// first one also has files that git ignores.
const commitSources = `
	mkdir "$CLONE"
	git ls-files -z --cached --others --exclude-standard | tar --create --null --files-from=- --ignore-failed-read 2>/dev/null |
		tar --extract --directory="$CLONE"
	cd "$CLONE"
	git init --quiet .
	git add .
	git -c user.name=x -c user.email=x@example.com commit --quiet --message=sources
	git clone --quiet "$CLONE" "$OTHER"
	printf '*.out\nignored*\n' >.git/info/exclude
	printf 'secret: SEEDED\n' | tee deploy/helm/slicecast/ignored.yaml deploy/helm/slicecast/templates/ignored.yaml deploy/systemd/ignored.yaml >/dev/null
	printf 'package main\n\nfunc init() { panic("SEEDED") }\n' | tee server/ignored.go agent/ignored.go loadtest/ignored.go >/dev/null
`

// buildTwice makes dry runs in both clones, by the command as users run it. Under the race
// detector, packing would take ten times as long. Programs for other systems than Linux are left
// to `make release-dry-run`: compiling their modules would take minutes.
func buildTwice(ctx context.Context) error {
	root, err := repository.Root()
	if err != nil {
		return err
	}
	if err := errors.Join(os.MkdirAll(temporary, 0o755), os.Setenv("TMPDIR", temporary)); err != nil {
		return err
	}
	created := strconv.FormatInt(testRelease.created.Unix(), 10)
	if err := run(ctx, root, nil, "go", "build", "-o", theCommand, "./internal/tools/release"); err != nil {
		return err
	}
	variables := []string{
		"CLONE=" + clone, "OTHER=" + otherPlace,
		"GIT_CONFIG_GLOBAL=" + os.DevNull, "GIT_COMMITTER_DATE=@" + created + " +0000", "GIT_AUTHOR_DATE=@" + created + " +0000",
	}
	if err := run(ctx, root, variables, "bash", "-e", "-o", "pipefail", "-c", commitSources); err != nil {
		return err
	}
	if testRelease.revision, err = git(ctx, "-C", clone, "rev-parse", "HEAD"); err != nil {
		return err
	}
	build := []string{"build", "--version=" + testRelease.version, "--platforms=linux/amd64,linux/arm64"}
	if err := run(ctx, clone, nil, theCommand, append(build, firstRelease)...); err != nil {
		return err
	}
	// What a machine may have set must not take part.
	defer unix.Umask(unix.Umask(0o077))
	if err := os.WriteFile(settingsFile, []byte("GOFIPS140=latest\nGOEXPERIMENT=jsonv2\nGOARM64=v8.2\n"), 0o600); err != nil {
		return err
	}
	settings := []string{
		epoch + "=" + created, "TZ=Asia/Tokyo", "GOENV=" + settingsFile, "GOFLAGS=-race", "GOAMD64=v3", "CGO_ENABLED=1", "GODEBUG=http2client=0",
	}
	return run(ctx, otherPlace, settings, theCommand, append(build, secondRelease)...)
}

// run runs a program in a folder with additional variables in its environment.
func run(ctx context.Context, dir string, environment []string, program string, args ...string) error {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir, cmd.Env, cmd.Stderr = dir, append(os.Environ(), environment...), os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", cmd, err)
	}
	return nil
}

// extract returns a folder with the files of an image. Two layers must not have the same file.
func extract(t *testing.T, img v1.Image) string {
	t.Helper()
	root := t.TempDir()
	layers, err := img.Layers()
	require.NoError(t, err)
	for _, layer := range layers {
		compressed, err := layer.Compressed()
		require.NoError(t, err)
		untar(t, root, compressed, "--gzip", "--preserve-permissions", "--keep-old-files", "--keep-directory-symlink")
		require.NoError(t, compressed.Close())
	}
	return root
}

// untar extracts an archive into a folder. Under the race detector, Go's own packages would take
// minutes to decompress the images.
func untar(t *testing.T, dir string, archive io.Reader, flags ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "tar", append([]string{"--extract", "--directory=" + dir}, flags...)...)
	cmd.Stdin = archive
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
}
