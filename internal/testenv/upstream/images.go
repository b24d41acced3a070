package upstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/testenv/cluster"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
	"github.com/slicecast/slicecast/internal/testenv/repository"
)

// programs are what this package runs besides the components of the cluster.
var programs = []string{"e2e.test", "ginkgo", "regression-issue-74839"}

// packages are the commands that only the tests' images need, with their Debian packages.
var packages = []string{"wget:wget", "nslookup:bind9-dnsutils", "conntrack:conntrack"}

// commands are the commands that the tests run in containers.
var commands = []string{
	"sh", "awk", "cat", "chmod", "conntrack", "cp", "curl", "cut", "date", "dd", "dig", "echo", "env", "expr", "false", "find",
	"getent", "grep", "head", "hostname", "id", "ip", "ls", "mkdir", "nc", "nslookup", "printf", "rm", "sed", "seq",
	"sleep", "sort", "ss", "tail", "tee", "test", "timeout", "touch", "tr", "true", "uname", "uniq", "wc", "wget", "xargs",
}

// Prepare builds and installs what this package needs, which takes minutes on a new machine. Call
// it outside of the namespaces, as an argument of [cluster.Main] or [cluster.Isolate].
func Prepare() error {
	ctx := context.Background()
	root, err := repository.Root()
	if err != nil {
		return err
	}
	install := exec.CommandContext(ctx, "internal/tools/packages.sh", packages...)
	install.Dir, install.Stdout, install.Stderr = root, os.Stderr, os.Stderr
	if err := install.Run(); err != nil {
		return fmt.Errorf("install packages (see the output above): %w", err)
	}
	for _, program := range programs {
		if _, err := controlplane.KubernetesBinary(ctx, program); err != nil {
			return err
		}
	}
	return nil
}

// importImages loads the images of the tests into the nodes. Their names are those of upstream's
// test/utils/image/manifest.go. A test that needs a shell, or only a running container, gets the
// same files under each name.
func importImages(ctx context.Context, c *cluster.Cluster) error {
	dir, err := os.MkdirTemp(c.Dir, "images")
	if err != nil {
		return err
	}
	agnhost, err := controlplane.KubernetesBinary(ctx, "agnhost")
	if err != nil {
		return err
	}
	regression, err := controlplane.KubernetesBinary(ctx, "regression-issue-74839")
	if err != nil {
		return err
	}
	coredns, err := cluster.CoreDNSBinary(ctx)
	if err != nil {
		return err
	}
	cert, key, err := writeCertificate(dir)
	if err != nil {
		return err
	}
	files := map[string]string{
		"/coredns": coredns, "/etc/nsswitch.conf": "/etc/nsswitch.conf", "/localhost.crt": cert, "/localhost.key": key,
	}
	if err := addRegistry(ctx, filepath.Join(dir, "registry"), agnhost, files); err != nil {
		return fmt.Errorf("agnhost's registry: %w", err)
	}
	const registry = "registry.k8s.io/e2e-test-images/"
	var images []cluster.Image
	for _, name := range []string{
		cluster.AgnhostImage, registry + "busybox:1.37.0-2", registry + "nginx:1.27.0-2", registry + "nginx:1.28.0-2",
		registry + "glibc-dns-testing:2.1.1", "registry.k8s.io/build-image/distroless-iptables:v0.9.9",
	} {
		images = append(images, cluster.Image{
			Name: name, Binary: agnhost, Entrypoint: "/agnhost", Args: []string{"pause"}, Commands: commands, Files: files,
		})
	}
	images = append(images, cluster.Image{
		Name: registry + "regression-issue-74839:1.5", Binary: regression, Entrypoint: "/regression-issue-74839",
	})
	path := filepath.Join(dir, "images.tar")
	if err := cluster.WriteImages(ctx, path, images...); err != nil {
		return err
	}
	return errors.Join(c.Import(ctx, path), os.RemoveAll(dir))
}

// addRegistry writes the content of the registry that agnhost serves from /var/registry, and adds
// it to the files of its image. It has one image, pause:testing, in the folders that upstream's
// fakeregistryserver reads: a tag's file has a digest, and a digest's folder the data.
func addRegistry(ctx context.Context, dir, agnhost string, files map[string]string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	archive := filepath.Join(dir, "pause.tar")
	err := cluster.WriteImages(ctx, archive, cluster.Image{
		Name: "pause:testing", Binary: agnhost, Entrypoint: "/agnhost", Args: []string{"pause"},
	})
	if err != nil {
		return err
	}
	image, err := tarball.ImageFromPath(archive, nil)
	if err != nil {
		return err
	}
	add := func(content io.Reader, path ...string) error {
		file := filepath.Join(dir, strings.Join(path, "-"))
		files["/var/registry/pause/"+strings.Join(path, "/")] = file
		to, err := os.Create(file)
		if err != nil {
			return err
		}
		_, err = io.Copy(to, content)
		return errors.Join(err, to.Close())
	}
	data := func(kind string, digest v1.Hash, content io.Reader) error {
		return add(content, kind, digest.Algorithm, digest.Hex[:2], digest.Hex, "data")
	}
	manifest, err := image.RawManifest()
	if err != nil {
		return err
	}
	config, err := image.RawConfigFile()
	if err != nil {
		return err
	}
	digest, err := image.Digest()
	if err != nil {
		return err
	}
	name, err := image.ConfigName()
	if err != nil {
		return err
	}
	layers, err := image.Layers()
	if err != nil {
		return err
	}
	err = errors.Join(
		add(strings.NewReader(digest.String()), "manifests", "testing"),
		data("manifests", digest, bytes.NewReader(manifest)),
		data("blobs", name, bytes.NewReader(config)),
	)
	for _, layer := range layers {
		digest, digestErr := layer.Digest()
		content, contentErr := layer.Compressed()
		if err = errors.Join(err, digestErr, contentErr); err != nil {
			return err
		}
		err = errors.Join(data("blobs", digest, content), content.Close())
	}
	return err
}

// writeCertificate writes the certificate of agnhost's HTTPS servers, which no client verifies.
func writeCertificate(dir string) (cert, key string, err error) {
	ca, err := testca.New()
	if err != nil {
		return "", "", err
	}
	certificate, err := ca.Server("localhost")
	if err != nil {
		return "", "", err
	}
	return testca.Write(dir, "localhost", certificate)
}
