package main

import (
	"archive/tar"
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// The annotations by which programs find an image in a layout: the standard one and containerd's.
const (
	refName        = "org.opencontainers.image.ref.name"
	containerdName = "io.containerd.image.name"
)

// spdxType is the type of SBOMs in a registry.
const spdxType = "application/spdx+json"

// write writes the images into a folder: an OCI layout of all of them, and for each architecture of
// an image an archive and an SBOM.
func write(dir string, r release, all []built) error {
	if err := emptyFolder(dir, filepath.Join("layout", "oci-layout")); err != nil {
		return err
	}
	root := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, i := range images {
		ref, err := name.NewTag(published+"/"+i.name+":"+r.version, name.StrictValidation)
		if err != nil {
			return fmt.Errorf("version %q: %w: use letters, digits, dots and dashes", r.version, err)
		}
		index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
		for _, b := range all {
			if b.name != i.name {
				continue
			}
			platform := &v1.Platform{OS: "linux", Architecture: b.architecture}
			descriptor := v1.Descriptor{Platform: platform, Annotations: names(ref)}
			file := filepath.Join(dir, i.name+"-"+b.architecture)
			progress("writing %s.tar", file)
			if err := writeArchive(file+".tar", r, ref, mutate.IndexAddendum{Add: b.Image, Descriptor: descriptor}); err != nil {
				return err
			}
			if err := os.WriteFile(file+".spdx.json", b.sbom, 0o644); err != nil {
				return err
			}
			index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: b.Image, Descriptor: v1.Descriptor{Platform: platform}})
		}
		root = mutate.AppendManifests(root, mutate.IndexAddendum{Add: index, Descriptor: v1.Descriptor{Annotations: names(ref)}})
		digest, err := index.Digest()
		if err != nil {
			return err
		}
		fmt.Printf("%s@%s\n", ref, digest)
	}
	_, err := layout.Write(filepath.Join(dir, "layout"), root)
	return err
}

// names returns the annotations of an image with a name.
func names(ref name.Tag) map[string]string {
	return map[string]string{refName: ref.Name(), containerdName: ref.Name()}
}

// writeArchive writes an archive with an image for one architecture. It is an OCI layout, and for
// older versions of Docker it also has the list of images that `docker save` writes.
func writeArchive(file string, r release, ref name.Tag, img mutate.IndexAddendum) error {
	dir, err := os.MkdirTemp(filepath.Dir(file), "archive-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }() // the next build removes it
	index := mutate.AppendManifests(mutate.IndexMediaType(empty.Index, types.OCIImageIndex), img)
	if _, err := layout.Write(dir, index); err != nil {
		return err
	}
	manifest, err := img.Add.(v1.Image).Manifest()
	if err != nil {
		return err
	}
	blob := func(d v1.Descriptor) string { return path.Join("blobs", d.Digest.Algorithm, d.Digest.Hex) }
	listed := tarball.Descriptor{Config: blob(manifest.Config), RepoTags: []string{ref.Name()}}
	for _, layer := range manifest.Layers {
		listed.Layers = append(listed.Layers, blob(layer))
	}
	content, err := json.Marshal(tarball.Manifest{listed})
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "manifest.json"), content, 0o644); err != nil {
		return err
	}
	return writeTar(file, dir, r)
}

// writeTar writes the files of a folder, in the order of their names, into an archive.
func writeTar(file, dir string, r release) error {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer f.Close()
	w := tar.NewWriter(f)
	root := os.DirFS(dir)
	err = fs.WalkDir(root, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := fs.ReadFile(root, name)
		if err != nil {
			return err
		}
		header := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, ModTime: r.created, Size: int64(len(content))}
		if err := w.WriteHeader(header); err != nil {
			return err
		}
		_, err = w.Write(content)
		return err
	})
	if err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	return f.Close()
}

// push pushes the images that build wrote to a registry, each with its SBOMs as referrers. The
// credentials are those of docker login.
func push(ctx context.Context, dir, registry string) error {
	root, err := layout.ImageIndexFromPath(filepath.Join(dir, "layout"))
	if err != nil {
		return fmt.Errorf("%w: run `make images` first", err)
	}
	manifest, err := root.IndexManifest()
	if err != nil {
		return err
	}
	pusher, err := remote.NewPusher(remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain))
	if err != nil {
		return err
	}
	for _, d := range manifest.Manifests {
		built, err := name.NewTag(d.Annotations[refName])
		if err != nil {
			return err
		}
		image := path.Base(built.RepositoryStr())
		ref, err := name.NewTag(registry + "/" + image + ":" + built.TagStr())
		if err != nil {
			return fmt.Errorf("registry %q: %w: name it like registry.example.com/team", registry, err)
		}
		index, err := root.ImageIndex(d.Digest)
		if err != nil {
			return err
		}
		progress("pushing %s", ref)
		if err := pusher.Push(ctx, ref, index); err != nil {
			return fmt.Errorf("push %s: %w: log in with `docker login` if the registry refuses you", ref, err)
		}
		if err := pushSBOMs(ctx, pusher, ref.Context(), index, filepath.Join(dir, image)); err != nil {
			return err
		}
		fmt.Printf("%s@%s\n", ref, d.Digest)
	}
	return nil
}

// pushSBOMs pushes the SBOM of each image of an index. The names of their files begin with prefix.
func pushSBOMs(ctx context.Context, pusher *remote.Pusher, to name.Repository, index v1.ImageIndex, prefix string) error {
	manifest, err := index.IndexManifest()
	if err != nil {
		return err
	}
	for _, d := range manifest.Manifests {
		content, err := os.ReadFile(prefix + "-" + d.Platform.Architecture + ".spdx.json")
		if err != nil {
			return err
		}
		img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), spdxType)
		img, err = mutate.AppendLayers(img, static.NewLayer(content, spdxType))
		if err != nil {
			return err
		}
		referrer := mutate.Subject(img, d).(v1.Image)
		digest, err := referrer.Digest()
		if err != nil {
			return err
		}
		if err := pusher.Push(ctx, to.Digest(digest.String()), referrer); err != nil {
			return fmt.Errorf("push the SBOM of %s for %s: %w", to, d.Platform.Architecture, err)
		}
	}
	return nil
}
