// These tests prove that in the images, every program finds its libraries, and that the SBOM lists
// all packages. The archives have the forms that containerd and
// Docker load, and a registry receives the same digests.
package main

import (
	"crypto/x509"
	"debug/elf"
	"io"
	"io/fs"
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdxlib"
	"github.com/stretchr/testify/require"
)

// each runs a test for every image and architecture in the layout.
func each(t *testing.T, f func(t *testing.T, i image, architecture string, img v1.Image)) {
	root, err := layout.ImageIndexFromPath(filepath.Join(firstBuild, "layout"))
	require.NoError(t, err)
	manifest, err := root.IndexManifest()
	require.NoError(t, err)
	require.Len(t, manifest.Manifests, len(images))
	for n, i := range images {
		d := manifest.Manifests[n]
		require.Equal(t, "ghcr.io/slicecast/"+i.name+":v1.2.3-test", d.Annotations["org.opencontainers.image.ref.name"])
		index, err := root.ImageIndex(d.Digest)
		require.NoError(t, err)
		platforms, err := index.IndexManifest()
		require.NoError(t, err)
		require.Len(t, platforms.Manifests, len(architectures))
		for n, architecture := range architectures {
			require.Equal(t, "linux/"+architecture, platforms.Manifests[n].Platform.String())
			img, err := index.Image(platforms.Manifests[n].Digest)
			require.NoError(t, err)
			t.Run(i.name+"/"+architecture, func(t *testing.T) { f(t, i, architecture, img) })
		}
	}
}

// TestContents looks at the configuration and the files of each image.
func TestContents(t *testing.T) {
	each(t, func(t *testing.T, i image, architecture string, img v1.Image) {
		config, err := img.ConfigFile()
		require.NoError(t, err)
		require.Equal(t, "linux/"+architecture, config.Platform().String())
		require.Equal(t, testRelease.created, config.Created.Time)
		require.Equal(t, []string{"/usr/local/bin/slicecast-" + i.command}, config.Config.Entrypoint)
		require.Equal(t, i.command == "server", config.Config.User == "65532:65532", config.Config.User)
		require.Equal(t, "v1.2.3-test", config.Config.Labels["org.opencontainers.image.version"])
		require.Equal(t, testRelease.revision, config.Config.Labels["org.opencontainers.image.revision"])

		root := extract(t, img)
		for _, user := range []string{"root:x:0:0:", "nonroot:x:65532:65532:"} {
			passwd, err := os.ReadFile(filepath.Join(root, "etc/passwd"))
			require.NoError(t, err)
			require.Contains(t, string(passwd), user)
		}
		certificates, err := os.ReadFile(filepath.Join(root, "etc/ssl/certs/ca-certificates.crt"))
		require.NoError(t, err)
		require.True(t, x509.NewCertPool().AppendCertsFromPEM(certificates))
		info, err := os.Stat(filepath.Join(root, "tmp"))
		require.NoError(t, err)
		require.Equal(t, fs.ModeDir|fs.ModeSticky|0o777, info.Mode())
		require.FileExists(t, filepath.Join(root, "usr/share/zoneinfo/Europe/Berlin"))
		release, err := os.ReadFile(filepath.Join(root, "usr/lib/os-release"))
		require.NoError(t, err)
		require.Contains(t, string(release), "VERSION_ID=\"13\"\n")
		checkPrograms(t, i, architecture, root)
	})
}

// checkPrograms requires that all programs and libraries of an image are of its architecture and
// find the libraries that they need, and that no link leads nowhere.
func checkPrograms(t *testing.T, i image, architecture, root string) {
	t.Helper()
	machine := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[architecture]
	triplet := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[architecture]
	programs := 0
	require.NoError(t, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		require.NoError(t, err)
		if entry.Type()&fs.ModeSymlink != 0 {
			target, err := os.Readlink(path)
			require.NoError(t, err)
			require.False(t, filepath.IsAbs(target), path)
			_, err = os.Stat(path)
			require.NoError(t, err)
		}
		if !entry.Type().IsRegular() {
			return nil
		}
		f, err := elf.Open(path)
		if err != nil {
			return nil // another kind of file
		}
		defer func() { require.NoError(t, f.Close()) }()
		programs++
		require.Equal(t, machine, f.Machine, path)
		needed, err := f.ImportedLibraries()
		require.NoError(t, err)
		for _, library := range needed {
			require.FileExists(t, filepath.Join(root, "usr/lib", triplet, library), "%s needs it", path)
		}
		return nil
	}))
	if !i.iptables {
		require.Equal(t, 1, programs, "the image has other programs than its own")
		return
	}
	for _, program := range []string{"iptables", "iptables-nft", "iptables-legacy", "ip6tables", "ip6tables-nft", "ip6tables-legacy"} {
		for _, end := range []string{"", "-save", "-restore"} {
			require.FileExists(t, filepath.Join(root, "usr/sbin", program+end))
		}
	}
	require.FileExists(t, filepath.Join(root, "sbin/modprobe"))
	// modprobe loads these only for modules that are compressed.
	require.FileExists(t, filepath.Join(root, "usr/lib", triplet, "liblzma.so.5"))
	require.FileExists(t, filepath.Join(root, "usr/lib", triplet, "libzstd.so.1"))
}

// TestSBOM requires that an SBOM is valid and lists the modules of the program. It lists the same
// packages as the image's own records, which scanners read.
func TestSBOM(t *testing.T) {
	each(t, func(t *testing.T, i image, architecture string, img v1.Image) {
		f, err := os.Open(filepath.Join(firstBuild, i.name+"-"+architecture+".spdx.json"))
		require.NoError(t, err)
		defer f.Close()
		doc, err := spdxjson.Read(f)
		require.NoError(t, err)
		require.NoError(t, spdxlib.ValidateDocument(doc))
		digest, err := img.Digest()
		require.NoError(t, err)
		require.Equal(t, digest.Hex, doc.Packages[0].PackageChecksums[0].Value)

		var locators, debs []string
		for _, p := range doc.Packages {
			locator := p.PackageExternalReferences[0].Locator
			locators = append(locators, locator)
			if strings.HasPrefix(locator, "pkg:deb/") {
				debs = append(debs, p.PackageName+" "+p.PackageVersion)
			}
		}
		all := strings.Join(locators, "\n")
		require.Contains(t, all, "pkg:golang/github.com/slicecast/slicecast@v1.2.3-test\n")
		require.Contains(t, all, "pkg:golang/google.golang.org/grpc@v")
		require.Contains(t, all, "pkg:golang/stdlib@1.")
		require.Contains(t, all, "pkg:deb/debian/tzdata@")
		require.Equal(t, i.iptables, strings.Contains(all, "pkg:deb/debian/iptables@1."))
		require.Equal(t, i.iptables, strings.Contains(all, "&upstream=glibc"))
		require.ElementsMatch(t, debs, recorded(t, extract(t, img)))
	})
}

// recorded returns the names and versions in the records of an image's packages.
func recorded(t *testing.T, root string) (all []string) {
	t.Helper()
	records, err := filepath.Glob(filepath.Join(root, "var/lib/dpkg/status.d/*"))
	require.NoError(t, err)
	for _, record := range records {
		content, err := os.ReadFile(record)
		require.NoError(t, err)
		first, _, _ := strings.Cut(string(content), "\n\n")
		fields := map[string]string{}
		for line := range strings.Lines(first) {
			key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
			fields[key] = value
		}
		require.Equal(t, "install ok installed", fields["Status"], record)
		all = append(all, fields["Package"]+" "+fields["Version"])
	}
	return all
}

// TestImageArchives reads each archive as Docker does, by its list of images, and as containerd
// does, as an OCI layout. Both have to find the image of the layout.
func TestImageArchives(t *testing.T) {
	each(t, func(t *testing.T, i image, architecture string, img v1.Image) {
		archive := filepath.Join(firstBuild, i.name+"-"+architecture+".tar")
		want, err := img.ConfigName()
		require.NoError(t, err)
		tag, err := name.NewTag("ghcr.io/slicecast/" + i.name + ":v1.2.3-test")
		require.NoError(t, err)
		docker, err := tarball.ImageFromPath(archive, &tag)
		require.NoError(t, err)
		got, err := docker.ConfigName()
		require.NoError(t, err)
		require.Equal(t, want, got)
		require.NoError(t, validate.Image(docker, validate.Fast))

		digest, err := img.Digest()
		require.NoError(t, err)
		dir := unpackArchive(t, archive)
		blobs, err := os.ReadDir(filepath.Join(dir, "blobs/sha256"))
		require.NoError(t, err)
		for _, blob := range blobs {
			content, err := os.ReadFile(filepath.Join(dir, "blobs/sha256", blob.Name()))
			require.NoError(t, err)
			require.Equal(t, blob.Name(), hash(content))
		}
		index, err := layout.ImageIndexFromPath(dir)
		require.NoError(t, err)
		manifest, err := index.IndexManifest()
		require.NoError(t, err)
		require.Len(t, manifest.Manifests, 1)
		require.Equal(t, digest, manifest.Manifests[0].Digest)
		require.Equal(t, tag.Name(), manifest.Manifests[0].Annotations["io.containerd.image.name"])
	})
}

func unpackArchive(t *testing.T, archive string) string {
	t.Helper()
	f, err := os.Open(archive)
	require.NoError(t, err)
	defer f.Close()
	dir := t.TempDir()
	untar(t, dir, f)
	return dir
}

// TestPush pushes everything to a registry twice and finds the same digests and the SBOMs there.
func TestPush(t *testing.T) {
	server := httptest.NewServer(registry.New(registry.WithReferrersSupport(true),
		registry.Logger(slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo))))
	defer server.Close()
	at := strings.TrimPrefix(server.URL, "http://") + "/team"
	require.NoError(t, push(t.Context(), firstBuild, at))
	require.NoError(t, push(t.Context(), firstBuild, at))
	each(t, func(t *testing.T, i image, architecture string, img v1.Image) {
		tag, err := name.NewTag(at + "/" + i.name + ":v1.2.3-test")
		require.NoError(t, err)
		pushed, err := remote.Image(tag, remote.WithPlatform(v1.Platform{OS: "linux", Architecture: architecture}))
		require.NoError(t, err)
		require.NoError(t, validate.Image(pushed, validate.Fast))
		want, err := img.Digest()
		require.NoError(t, err)
		got, err := pushed.Digest()
		require.NoError(t, err)
		require.Equal(t, want, got)

		referrers, err := remote.Referrers(tag.Digest(want.String()))
		require.NoError(t, err)
		manifest, err := referrers.IndexManifest()
		require.NoError(t, err)
		require.Len(t, manifest.Manifests, 1)
		require.Equal(t, spdxType, manifest.Manifests[0].ArtifactType)
		attached, err := remote.Image(tag.Digest(manifest.Manifests[0].Digest.String()))
		require.NoError(t, err)
		layers, err := attached.Layers()
		require.NoError(t, err)
		content, err := layers[0].Compressed()
		require.NoError(t, err)
		defer content.Close()
		sbom, err := io.ReadAll(content)
		require.NoError(t, err)
		file, err := os.ReadFile(filepath.Join(firstBuild, i.name+"-"+architecture+".spdx.json"))
		require.NoError(t, err)
		require.Equal(t, string(file), string(sbom))
	})
}

// TestNothingToPush requires that errors say what to do.
func TestNothingToPush(t *testing.T) {
	require.ErrorContains(t, push(t.Context(), t.TempDir(), "localhost:1"), "run `make images` first")
	require.ErrorContains(t, push(t.Context(), firstBuild, "not a registry"), "name it like")
}

// TestOtherFilesStay requires that a build refuses a folder with other files.
func TestOtherFilesStay(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "thesis.txt"), nil, 0o600))
	require.ErrorContains(t, write(dir, testRelease, nil), "name another folder")
	require.FileExists(t, filepath.Join(dir, "thesis.txt"))
}
