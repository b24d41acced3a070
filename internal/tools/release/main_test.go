// This file runs the command twice before the tests. The second build is of the same sources at
// another place, as on another machine.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
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
	otherPlace    = "/run/slicecast-release/another place"
	temporary     = "/run/slicecast-release/tmp"
	theCommand    = "/run/slicecast-release/program"
)

// testRelease is what the builds are told of their sources, and what git says.
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

// buildTwice makes dry runs at two places, by the command as users run it. Under the race detector,
// packing would take ten times as long. Programs for other systems than Linux are left to
// `make release-dry-run`: compiling their modules would take minutes.
func buildTwice(ctx context.Context) error {
	root, err := repository.Root()
	if err != nil {
		return err
	}
	if err := errors.Join(os.MkdirAll(otherPlace, 0o755), os.MkdirAll(temporary, 0o755),
		os.Setenv("TMPDIR", temporary), unix.Mount(root, otherPlace, "", unix.MS_BIND|unix.MS_REC, "")); err != nil {
		return err
	}
	if testRelease.revision, err = git(ctx, "rev-parse", "HEAD"); err != nil {
		return err
	}
	created := fmt.Sprintf("SOURCE_DATE_EPOCH=%d", testRelease.created.Unix())
	if err := run(ctx, root, []string{created}, "go", "build", "-o", theCommand, "./internal/tools/release"); err != nil {
		return err
	}
	build := []string{"build", "--version=" + testRelease.version, "--platforms=linux/amd64,linux/arm64"}
	if err := run(ctx, root, []string{created}, theCommand, append(build, firstRelease)...); err != nil {
		return err
	}
	// What a machine may have set must not take part.
	defer unix.Umask(unix.Umask(0o077))
	settings := []string{created, "TZ=Asia/Tokyo", "GOFLAGS=-race", "GOAMD64=v3", "CGO_ENABLED=1"}
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
