package main

import (
	"archive/tar"
	"bytes"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// files holds the files of a layer by their names, which are relative to the root.
type files map[string]file

// file is a file, folder or link. Its owner is root.
type file struct {
	kind    byte // as in tar.Header.Typeflag
	mode    int64
	target  string // of a link
	time    time.Time
	content []byte
}

// add adds a file that belongs to no package. A fixed time keeps the layer, and with it what nodes
// have already pulled, the same from version to version.
func (f files) add(name, content string) {
	f[name] = file{kind: tar.TypeReg, mode: 0o644, time: time.Unix(0, 0), content: []byte(content)}
}

func (f files) link(name, target string) {
	f[name] = file{kind: tar.TypeSymlink, mode: 0o777, time: time.Unix(0, 0), target: target}
}

// each calls do for all files in the order of their names.
func (f files) each(do func(name string, f file) error) error {
	for _, name := range slices.Sorted(maps.Keys(f)) {
		if err := do(name, f[name]); err != nil {
			return err
		}
	}
	return nil
}

// tar writes the files as an archive.
func (f files) tar(to io.Writer) error {
	w := tar.NewWriter(to)
	err := f.each(func(name string, file file) error {
		header := &tar.Header{
			Typeflag: file.kind, Name: name, Linkname: file.target, Mode: file.mode,
			ModTime: file.time, Size: int64(len(file.content)),
		}
		if file.kind == tar.TypeDir {
			header.Name = strings.TrimSuffix(name, "/") + "/"
		}
		if err := w.WriteHeader(header); err != nil {
			return err
		}
		_, err := w.Write(file.content)
		return err
	})
	if err != nil {
		return err
	}
	return w.Close()
}

// pack packs the files into a layer.
func (f files) pack() (v1.Layer, error) {
	var b bytes.Buffer
	if err := f.tar(&b); err != nil {
		return nil, err
	}
	content := b.Bytes()
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(content)), nil
	}, tarball.WithMediaType(types.OCILayer), tarball.WithCompressedCaching)
}
