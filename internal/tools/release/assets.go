package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/v1/layout"
	attestation "github.com/in-toto/attestation/go/v1"
)

// imagesFolder is the folder of a release in which images are as `make images` writes them.
const imagesFolder = "images"

// imagesFile returns the name of the file that lists the images with their digests. It has the
// version, so that the lists of two releases are not mistaken for each other.
func (r release) imagesFile() string { return "slicecast_" + r.version + "_images.txt" }

// options say what is built.
type options struct {
	dir string
	// key is the path of the key of a real release. If it is empty, this is a dry run, which makes
	// a key for itself.
	key string
	// platforms limits the archives to some platforms, such as linux/amd64. Empty means all.
	platforms []string
}

// build builds everything that a release consists of: archives, images and the chart, their SBOMs,
// checksums, signatures and provenance.
func (r release) build(ctx context.Context, o options) error {
	wanted, err := o.wanted()
	if err != nil {
		return err
	}
	s, err := o.signer()
	if err != nil {
		return err
	}
	remove, err := r.export(ctx, o.key == "")
	if err != nil {
		return err
	}
	defer remove()
	if o.key != "" {
		if err := r.check(s); err != nil {
			return err
		}
	}
	// The file is there from the beginning, so that a run that failed does not stand in the way.
	if err := emptyFolder(o.dir, sumsFile); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(o.dir, sumsFile), nil, 0o644); err != nil {
		return err
	}
	p, remove, err := newPrograms(r)
	if err != nil {
		return err
	}
	defer remove()
	if err := archives(ctx, o.dir, p, wanted); err != nil {
		return err
	}
	if err := writeImages(ctx, filepath.Join(o.dir, imagesFolder), p); err != nil {
		return err
	}
	if err := r.linkImages(o.dir); err != nil {
		return err
	}
	if err := r.chart(ctx, o.dir); err != nil {
		return err
	}
	digests, err := r.listImages(o.dir)
	if err != nil {
		return err
	}
	sums, subjects, err := checksums(o.dir)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(o.dir, sumsFile), sums, 0o644); err != nil {
		return err
	}
	if err := s.sign(ctx, o.dir, r, sums, append(subjects, digests...)); err != nil {
		return err
	}
	if o.key != "" {
		progress("signed with the key %s; its public half is %s", s.fingerprint, publishedKey)
		// The key of an earlier dry run in the same folder verifies nothing any more.
		if err := os.Remove(dryRunKey(o.dir)); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	}
	progress("this is a dry run: only %s verifies it, and no user has that key", dryRunKey(o.dir))
	return os.WriteFile(dryRunKey(o.dir), s.public, 0o644)
}

// wanted returns a function that reports whether archives for a platform are wanted.
func (o options) wanted() (func(platform) bool, error) {
	known := make(map[string]bool)
	for _, p := range everywhere {
		known[p.os+"/"+p.architecture] = true
	}
	for _, name := range o.platforms {
		if !known[name] {
			return nil, fmt.Errorf("--platforms: %s: choose from %s", name, strings.Join(slices.Sorted(maps.Keys(known)), ", "))
		}
	}
	if o.key != "" && len(o.platforms) > 0 {
		return nil, errors.New("--platforms is for dry runs: remove it, or remove --key")
	}
	return func(p platform) bool {
		return len(o.platforms) == 0 || slices.Contains(o.platforms, p.os+"/"+p.architecture)
	}, nil
}

// signer returns the signer of the release.
func (o options) signer() (*signer, error) {
	if o.key == "" {
		progress("this is a dry run: its key signs nothing else")
		return generateSigner()
	}
	if os.Getenv(epoch) != "" {
		return nil, fmt.Errorf("%s is set, and a release has the time of its commit: unset it", epoch)
	}
	return newSigner(o.key)
}

// export makes the release be built from a folder with the files of the commit and nothing else:
// neither files that git ignores, nor what settings of this clone make of its files. It returns an
// error if the working directory is not a clean checkout of the tag. A dry run may be of any
// commit, and of a working directory with changes. remove removes the folder.
func (r *release) export(ctx context.Context, dry bool) (remove func(), err error) {
	changes, err := git(ctx, "status", "--porcelain")
	if err != nil {
		return nil, err
	}
	if changes != "" && !dry {
		return nil, fmt.Errorf("the tree has changes that are not committed: release from a clean checkout\n%s", changes)
	}
	if changes != "" {
		progress("the tree has changes that are not committed: building from it, with all files that are there")
		return func() {}, nil
	}
	tagged, err := git(ctx, "tag", "--points-at", r.revision)
	if err != nil {
		return nil, err
	}
	if !slices.Contains(strings.Fields(tagged), r.version) && !dry {
		return nil, fmt.Errorf("the current commit does not have the tag %s: check out the tag, or name its version", r.version)
	}
	root, err := filepath.Abs(r.sources)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "slicecast-sources-")
	if err != nil {
		return nil, err
	}
	remove = func() { _ = os.RemoveAll(dir) } // a temporary folder that stays does no harm
	plain := []string{"-c", "core.autocrlf=false", "-c", "core.attributesFile=" + os.DevNull, "-c", "core.hooksPath=" + os.DevNull}
	if _, err = git(ctx, append(plain, "clone", "--quiet", "--shared", "--no-checkout", "--template=", root, dir)...); err == nil {
		_, err = git(ctx, append(plain, "-C", dir, "checkout", "--quiet", "--detach", r.revision)...)
	}
	if err != nil {
		remove()
		return nil, err
	}
	r.sources = dir
	return remove, nil
}

// check returns an error if the sources do not have what users look for: a section of the version
// in the changelog, and the public key with its fingerprint.
func (r release) check(s *signer) error {
	read := func(name string) ([]byte, error) { return os.ReadFile(filepath.Join(r.sources, name)) }
	changelog, err := read("CHANGELOG.md")
	if err != nil {
		return err
	}
	section := regexp.MustCompile(`(?m)^## \[` + regexp.QuoteMeta(strings.TrimPrefix(r.version, "v")) + `\] - \d{4}-\d\d-\d\d$`)
	if !section.Match(changelog) {
		return fmt.Errorf("CHANGELOG.md has no section of %s with a date: write it before the tag", r.version)
	}
	switch published, err := read(publishedKey); {
	case err != nil:
		return fmt.Errorf("%w: commit the public key as docs/releasing.md says, before the tag", err)
	case !bytes.Equal(published, s.public):
		return fmt.Errorf("--key has the fingerprint %s and does not belong to %s: use the key of earlier releases", s.fingerprint, publishedKey)
	}
	page, err := read(keyPage)
	if err != nil {
		return err
	}
	if !strings.Contains(string(page), s.fingerprint) {
		return fmt.Errorf("%s does not name the key by its fingerprint %s: write it there before the tag", keyPage, s.fingerprint)
	}
	return nil
}

// linkImages puts the images' archives beside the other files, under names with the version.
func (r release) linkImages(dir string) error {
	for _, i := range images {
		for _, architecture := range architectures {
			from := filepath.Join(dir, imagesFolder, i.name+"-"+architecture)
			to := filepath.Join(dir, strings.Join([]string{i.name, r.version, "image", architecture}, "_"))
			if err := errors.Join(os.Link(from+".tar", to+".tar"), os.Link(from+".spdx.json", to+".tar.spdx.json")); err != nil {
				return err
			}
		}
	}
	return nil
}

// chart packages the chart.
func (r release) chart(ctx context.Context, dir string) error {
	packaged, err := os.MkdirTemp(dir, "chart-")
	if err != nil {
		return err
	}
	if packaged, err = filepath.Abs(packaged); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "internal/tools/chart.sh", packaged, r.version)
	cmd.Dir = r.sources
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("package the chart: %w", err)
	}
	found, err := filepath.Glob(filepath.Join(packaged, "*.tgz"))
	if err != nil || len(found) != 1 {
		return errors.Join(err, fmt.Errorf("helm has written %d charts", len(found)))
	}
	to := filepath.Join(dir, filepath.Base(found[0]))
	return errors.Join(repack(found[0], r.created), os.Rename(found[0], to), os.RemoveAll(packaged))
}

// listImages writes the list of images, and returns the images as subjects of the provenance.
func (r release) listImages(dir string) ([]*attestation.ResourceDescriptor, error) {
	index, err := layout.ImageIndexFromPath(filepath.Join(dir, imagesFolder, "layout"))
	if err != nil {
		return nil, err
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return nil, err
	}
	var list bytes.Buffer
	var subjects []*attestation.ResourceDescriptor
	for _, d := range manifest.Manifests {
		fmt.Fprintf(&list, "%s@%s\n", d.Annotations[refName], d.Digest)
		subjects = append(subjects, &attestation.ResourceDescriptor{
			Name: d.Annotations[refName], Digest: map[string]string{d.Digest.Algorithm: d.Digest.Hex},
		})
	}
	return subjects, os.WriteFile(filepath.Join(dir, r.imagesFile()), list.Bytes(), 0o644)
}

// checksums returns the checksums of the files in a folder, in the form of sha256sum, and the files
// as subjects of the provenance.
func checksums(dir string) (sums []byte, subjects []*attestation.ResourceDescriptor, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, nil, err
	}
	for _, e := range entries {
		if !e.Type().IsRegular() || e.Name() == sumsFile {
			continue
		}
		content, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, nil, err
		}
		sums = fmt.Appendf(sums, "%s  %s\n", hash(content), e.Name())
		subjects = append(subjects, &attestation.ResourceDescriptor{
			Name: e.Name(), Digest: map[string]string{"sha256": hash(content)},
		})
	}
	return sums, subjects, nil
}

// emptyFolder removes what an earlier run has written into a folder, which mark identifies. It
// creates the folder.
func emptyFolder(dir, mark string) error {
	_, err := os.Stat(filepath.Join(dir, mark))
	if entries, _ := os.ReadDir(dir); err != nil && len(entries) > 0 {
		return fmt.Errorf("%s has something other than what this writes in it: name another folder, or remove it", dir)
	}
	return errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o755))
}
