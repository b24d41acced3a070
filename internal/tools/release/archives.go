package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// bundle is an archive of programs for each of its platforms.
type bundle struct {
	name      string
	programs  []string // the folders of the commands
	bin       string   // the folder of the programs in the archive
	files     []string // patterns of further files, which keep their paths
	flat      []string // further files without their folders
	platforms []platform
}

var (
	linux      = []platform{{"linux", "amd64"}, {"linux", "arm64"}}
	everywhere = []platform{
		{"linux", "amd64"}, {"linux", "arm64"}, {"darwin", "amd64"}, {"darwin", "arm64"}, {"windows", "amd64"},
	}
)

// bundles lists all archives. The first one has what the commands for systemd in deploy/README.md
// install, in the same folders.
var bundles = []bundle{
	{
		name: "slicecast", programs: []string{"server", "agent", "loadtest"}, bin: "bin",
		files: []string{"deploy/systemd/*.service", "deploy/systemd/*.sysusers", "deploy/systemd/*.yaml"}, platforms: linux,
	},
	{
		name: "kubectl-slicecast", programs: []string{"deploy/kubectl-slicecast"},
		flat: []string{"deploy/kubectl-slicecast/kubectl_complete-slicecast"}, platforms: everywhere,
	},
}

// always are the files that all archives have.
var always = []string{"LICENSE", "README.md", "CHANGELOG.md"}

// archives writes all archives for the wanted platforms, and an SBOM of each, into a folder.
func archives(ctx context.Context, dir string, p *programs, wanted func(platform) bool) error {
	for _, b := range bundles {
		for _, on := range b.platforms {
			if !wanted(on) {
				continue
			}
			if err := b.write(ctx, dir, p, on); err != nil {
				return fmt.Errorf("archive %s for %s/%s: %w", b.name, on.os, on.architecture, err)
			}
		}
	}
	return nil
}

// write writes the archive for a platform. Everything in it is in one folder.
func (b bundle) write(ctx context.Context, dir string, p *programs, on platform) error {
	name := strings.Join([]string{b.name, p.release.version, on.os, on.architecture}, "_")
	content := make(files)
	add := func(to, from string, mode int64) error {
		text, err := os.ReadFile(filepath.Join(p.release.sources, from))
		content[path.Join(name, to)] = file{kind: tar.TypeReg, mode: mode, time: p.release.created, content: text}
		return err
	}
	var built []string
	for _, folder := range b.programs {
		program, err := p.build(ctx, folder, on)
		if err != nil {
			return err
		}
		built = append(built, program)
		text, err := os.ReadFile(program)
		if err != nil {
			return err
		}
		content[path.Join(name, b.bin, filepath.Base(program))] = file{
			kind: tar.TypeReg, mode: 0o755, time: p.release.created, content: text,
		}
	}
	for _, f := range b.flat {
		if err := add(path.Base(f), f, 0o755); err != nil {
			return err
		}
	}
	for _, pattern := range append(slices.Clone(b.files), always...) {
		found, err := fs.Glob(os.DirFS(p.release.sources), pattern)
		if err != nil || len(found) == 0 {
			return errors.Join(err, fmt.Errorf("the sources have no %s", pattern))
		}
		for _, f := range found {
			if err := add(f, f, 0o644); err != nil {
				return err
			}
		}
	}
	archive, err := pack(content, on, p.release.created)
	if err != nil {
		return err
	}
	file := name + ".tar.gz"
	if on.os == "windows" {
		file = name + ".zip"
	}
	progress("writing %s", filepath.Join(dir, file))
	if err := os.WriteFile(filepath.Join(dir, file), archive, 0o644); err != nil {
		return err
	}
	sbom, err := p.release.sbom(part{
		name: file, hash: hash(archive), purpose: "ARCHIVE",
		purl: purl("generic/"+b.name, p.release.version) + "?checksum=sha256:" + hash(archive) +
			"&file_name=" + url.QueryEscape(file),
	}, built, nil)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, file+".spdx.json"), sbom, 0o644)
}

// pack packs files as the users of a platform expect it.
func pack(content files, on platform, created time.Time) ([]byte, error) {
	var out bytes.Buffer
	if on.os == "windows" {
		w := zip.NewWriter(&out)
		err := content.each(func(name string, f file) error {
			header := &zip.FileHeader{Name: name, Method: zip.Deflate, Modified: created.UTC()}
			header.SetMode(os.FileMode(f.mode))
			to, err := w.CreateHeader(header)
			if err != nil {
				return err
			}
			_, err = to.Write(f.content)
			return err
		})
		err = errors.Join(err, w.Close())
		return out.Bytes(), err
	}
	// Without a name and a time in its header, the compressed file is the same every time.
	zipped := gzip.NewWriter(&out)
	err := content.tar(zipped)
	err = errors.Join(err, zipped.Close())
	return out.Bytes(), err
}

// repack writes an archive anew, with the time of the commit. Helm writes the time at which it
// runs.
func repack(path string, created time.Time) error {
	old, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	unzipped, err := gzip.NewReader(bytes.NewReader(old))
	if err != nil {
		return err
	}
	content := make(files)
	for r := tar.NewReader(unzipped); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return err
		}
		text, err := io.ReadAll(r)
		if err != nil {
			return err
		}
		content[header.Name] = file{kind: header.Typeflag, mode: 0o644, time: created, content: text}
	}
	archive, err := pack(content, platform{os: "linux"}, created)
	if err != nil {
		return err
	}
	return os.WriteFile(path, archive, 0o644)
}
