package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
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

// imagesFile lists the images with their digests.
const imagesFile = "images.txt"

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
	s, err := o.signer(ctx, r)
	if err != nil {
		return err
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
	digests, err := listImages(o.dir)
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
	return s.sign(ctx, o.dir, r, sums, append(subjects, digests...))
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

// signer returns the signer of the release. The key of a real release must be the published one,
// and its sources must be those of the tag.
func (o options) signer(ctx context.Context, r release) (*signer, error) {
	if o.key == "" {
		progress("this is a dry run: its key signs nothing else")
		return generateSigner()
	}
	s, err := newSigner(o.key)
	if err != nil {
		return nil, err
	}
	if err := r.checkSources(ctx); err != nil {
		return nil, err
	}
	switch published, err := os.ReadFile(publishedKey); {
	case err != nil:
		return nil, fmt.Errorf("%w: commit the public key as docs/releasing.md says, before the tag", err)
	case !bytes.Equal(published, s.public):
		return nil, fmt.Errorf("--key=%s does not belong to %s: use the key of earlier releases", o.key, publishedKey)
	}
	return s, nil
}

// checkSources returns an error if the working directory is not a clean checkout of the tag, or if
// the changelog does not have the version.
func (r release) checkSources(ctx context.Context) error {
	changes, err := git(ctx, "status", "--porcelain")
	if err != nil {
		return err
	}
	if changes != "" {
		return fmt.Errorf("the tree has changes that are not committed: release from a clean checkout\n%s", changes)
	}
	tagged, err := git(ctx, "tag", "--points-at", "HEAD")
	if err != nil {
		return err
	}
	if !slices.Contains(strings.Fields(tagged), r.version) {
		return fmt.Errorf("the current commit does not have the tag %s: check out the tag, or name its version", r.version)
	}
	changelog, err := os.ReadFile("CHANGELOG.md")
	if err != nil {
		return err
	}
	section := regexp.MustCompile(`(?m)^## \[` + regexp.QuoteMeta(strings.TrimPrefix(r.version, "v")) + `\] - \d{4}-\d\d-\d\d$`)
	if !section.Match(changelog) {
		return fmt.Errorf("CHANGELOG.md has no section of %s with a date: write it before the tag", r.version)
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
	cmd := exec.CommandContext(ctx, "internal/tools/chart.sh", packaged, r.version)
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
func listImages(dir string) ([]*attestation.ResourceDescriptor, error) {
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
	return subjects, os.WriteFile(filepath.Join(dir, imagesFile), list.Bytes(), 0o644)
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
