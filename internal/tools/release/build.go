package main

import (
	"archive/tar"
	"context"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"pault.ag/go/debian/deb"
)

const (
	published = "ghcr.io/slicecast"
	source    = "https://github.com/slicecast/slicecast"
)

var architectures = []string{"amd64", "arm64"}

// image describes one image.
type image struct {
	name        string
	description string
	command     string // the package of its program, and the end of the program's name
	iptables    bool   // whether it has the programs of iptables, and modprobe
	user        string
}

// images lists all images. Agents start as root, because a program of another user has no
// capabilities unless the container runtime adds ambient ones. The manifests drop the capabilities
// that the agents do not need.
var images = []image{
	{"slicecast-server", "Streams Services and EndpointSlices of Kubernetes to nodes", "server", false, "65532:65532"},
	{"slicecast-agent", "Programs Services into a node's kernel with nftables or IPVS", "agent", false, "0:0"},
	{"slicecast-agent-iptables", "Programs Services into a node's kernel with nftables, iptables or IPVS", "agent", true, "0:0"},
}

// builder makes all images of a release from the sources in the working directory.
type builder struct {
	out      string // folder for the images; whatever is in it is replaced
	release  release
	debs     *debian
	programs *programs
}

// writeImages makes all images with programs of a release, and writes them into a folder.
func writeImages(ctx context.Context, dir string, p *programs) error {
	debs, err := newDebian()
	if err != nil {
		return err
	}
	return (&builder{dir, p.release, debs, p}).run(ctx)
}

// built is an image for one architecture.
type built struct {
	image
	architecture string
	v1.Image
	sbom []byte
}

// run makes all images and writes them.
func (b *builder) run(ctx context.Context) error {
	var all []built
	for _, architecture := range architectures {
		base, err := b.debs.layer(ctx, "base", architecture)
		if err != nil {
			return err
		}
		if err := base.configureBase(); err != nil {
			return err
		}
		iptables, err := b.debs.layer(ctx, "iptables", architecture)
		if err != nil {
			return err
		}
		iptables.configureIPTables()
		for _, i := range images {
			program, err := b.programs.build(ctx, i.command, platform{"linux", architecture})
			if err != nil {
				return err
			}
			parts := []*unpacked{base}
			if i.iptables {
				parts = append(parts, iptables)
			}
			built, err := b.assemble(i, architecture, program, parts)
			if err != nil {
				return fmt.Errorf("image %s for %s: %w", i.name, architecture, err)
			}
			all = append(all, built)
		}
	}
	return write(b.out, b.release, all)
}

// assemble makes an image of the parts and the program.
func (b *builder) assemble(i image, architecture, program string, parts []*unpacked) (built, error) {
	content, err := os.ReadFile(program)
	if err != nil {
		return built{}, err
	}
	path := "usr/local/bin/" + filepath.Base(program)
	own := files{path: {kind: tar.TypeReg, mode: 0o755, time: b.release.created, content: content}}

	var packages []deb.Control
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	for _, layer := range append(slices.Clone(parts), &unpacked{files: own}) {
		packages = append(packages, layer.packages...)
		packed, err := layer.pack()
		if err != nil {
			return built{}, err
		}
		history := v1.History{Created: v1.Time{Time: b.release.created}, CreatedBy: source, Comment: "the program"}
		if len(layer.packages) > 0 {
			history.Comment = "from Debian:"
		}
		for _, p := range layer.packages {
			history.Comment += " " + p.Package + "=" + p.Version.String()
		}
		img, err = mutate.Append(img, mutate.Addendum{Layer: packed, History: history})
		if err != nil {
			return built{}, err
		}
	}
	config, err := img.ConfigFile()
	if err != nil {
		return built{}, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", architecture
	config.Created = v1.Time{Time: b.release.created}
	config.Config = v1.Config{
		User: i.user, WorkingDir: "/", Entrypoint: []string{"/" + path}, Labels: b.labels(i),
		Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
	}
	if img, err = mutate.ConfigFile(img, config); err != nil {
		return built{}, err
	}
	digest, err := img.Digest()
	if err != nil {
		return built{}, err
	}
	sbom, err := b.release.sbom(part{
		name: i.name + "-" + architecture, hash: digest.Hex, purpose: "CONTAINER",
		purl: fmt.Sprintf("pkg:oci/%s@%s?arch=%s&repository_url=%s",
			i.name, url.QueryEscape(digest.String()), architecture, published+"/"+i.name),
	}, []string{program}, packages)
	return built{i, architecture, img, sbom}, err
}

// labels returns the labels of an image, which are the annotations of its index, too.
func (b *builder) labels(i image) map[string]string {
	const prefix = "org.opencontainers.image."
	return map[string]string{
		prefix + "title":         i.name,
		prefix + "description":   i.description,
		prefix + "version":       b.release.version,
		prefix + "revision":      b.release.revision,
		prefix + "created":       b.release.created.Format("2006-01-02T15:04:05Z07:00"),
		prefix + "source":        source,
		prefix + "documentation": source + "/blob/main/deploy/README.md",
		prefix + "licenses":      "Apache-2.0",
	}
}
