// This file builds all images twice before the tests run. The second build is of the same sources
// at another place, as on another machine.
package main

import (
	"archive/tar"
	"compress/gzip"
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
	firstBuild  = "/run/slicecast-images/first"
	secondBuild = "/run/slicecast-images/second"
	otherPlace  = "/run/slicecast-images/another place"
	temporary   = "/run/slicecast-images/tmp"
)

var testRelease = release{
	version: "v1.2.3-test", revision: "0123456789abcdef0123456789abcdef01234567",
	created: time.Date(2026, 11, 25, 8, 30, 0, 0, time.UTC),
}

func TestMain(m *testing.M) {
	testenv.Isolate(fetchAll)
	if err := buildTwice(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
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
	cmd := exec.Command("go", "list", "-deps", "./server", "./agent")
	cmd.Dir, cmd.Stderr = filepath.Join("..", "..", ".."), os.Stderr
	return cmd.Run()
}

// buildTwice builds the images at two places.
func buildTwice(ctx context.Context) error {
	root, err := repository.Root()
	if err != nil {
		return err
	}
	if err := errors.Join(os.MkdirAll(otherPlace, 0o755), os.MkdirAll(temporary, 0o755),
		os.Setenv("TMPDIR", temporary), unix.Mount(root, otherPlace, "", unix.MS_BIND|unix.MS_REC, "")); err != nil {
		return err
	}
	debs, err := newDebian()
	if err != nil {
		return err
	}
	if err := (&builder{root: root, out: firstBuild, release: testRelease, debs: debs}).run(ctx); err != nil {
		return err
	}
	// What a machine may have set must not take part.
	defer unix.Umask(unix.Umask(0o077))
	for name, value := range map[string]string{"TZ": "Asia/Tokyo", "GOFLAGS": "-race", "GOAMD64": "v3", "CGO_ENABLED": "1"} {
		before := os.Getenv(name)
		if err := os.Setenv(name, value); err != nil {
			return err
		}
		defer func() { _ = os.Setenv(name, before) }() // it was set before
	}
	return (&builder{root: otherPlace, out: secondBuild, release: testRelease, debs: debs}).run(ctx)
}

// extract returns a folder with the files of an image, without what older layers had at their
// places.
func extract(t *testing.T, img v1.Image) string {
	t.Helper()
	root := t.TempDir()
	layers, err := img.Layers()
	require.NoError(t, err)
	for _, layer := range layers {
		compressed, err := layer.Compressed()
		require.NoError(t, err)
		content, err := gzip.NewReader(compressed)
		require.NoError(t, err)
		r := tar.NewReader(content)
		for {
			header, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			require.NoError(t, err)
			place(t, filepath.Join(root, header.Name), header, r)
		}
		require.NoError(t, compressed.Close())
	}
	return root
}

// place creates one file of an image.
func place(t *testing.T, path string, header *tar.Header, content io.Reader) {
	t.Helper()
	mode := header.FileInfo().Mode()
	switch header.Typeflag {
	case tar.TypeDir:
		require.NoError(t, os.MkdirAll(path, 0o755))
		require.NoError(t, os.Chmod(path, mode))
		return
	case tar.TypeSymlink:
		require.NoError(t, os.Symlink(header.Linkname, path))
		return
	}
	require.Equal(t, byte(tar.TypeReg), header.Typeflag, path)
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	require.NoError(t, err)
	_, err = io.Copy(f, content)
	require.NoError(t, errors.Join(err, f.Close()))
}
