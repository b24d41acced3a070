package cluster

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// Image is a container image for this machine's architecture, made from the machine's files.
type Image struct {
	// Name is the reference under which manifests name the image.
	Name string
	// Commands are commands of this machine that the image has with their libraries. Images with
	// the same commands share a layer.
	Commands []string
	// Binary is the path of a program on this machine, and Entrypoint that of its copy in the image.
	Binary, Entrypoint string
	// Args are the arguments of a container that has none.
	Args []string
	// Files are more files: the paths of files on this machine by those of their copies in the image.
	Files map[string]string
}

// shell are the commands with which tests look around in containers.
var shell = []string{
	"sh", "cat", "chmod", "cp", "date", "env", "grep", "head", "hostname", "id", "ip", "ls", "mkdir", "printf", "rm", "sed",
	"seq", "sleep", "sort", "tail", "test", "timeout", "touch", "tr", "true", "uname", "wc", "curl", "dig", "nc", "ss",
}

// proxying are the commands that proxies run.
var proxying = []string{
	"sh", "cat", "sleep", "conntrack", "nft", "iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save",
	"ip6tables-restore", "iptables-nft", "iptables-nft-save", "iptables-nft-restore", "ip6tables-nft", "ip6tables-nft-save",
	"ip6tables-nft-restore", "iptables-legacy", "iptables-legacy-save", "iptables-legacy-restore", "ip6tables-legacy",
	"ip6tables-legacy-save", "ip6tables-legacy-restore",
}

// protocols is the file with the names of protocols.
const protocols = "/etc/protocols"

// WriteImages writes images to a file that containerd and Docker load.
func WriteImages(ctx context.Context, path string, images ...Image) error {
	layers := map[string]v1.Layer{}
	tagged := map[name.Tag]v1.Image{}
	for _, image := range images {
		tag, err := name.NewTag(image.Name)
		if err != nil {
			return err
		}
		if tagged[tag], err = image.build(ctx, layers); err != nil {
			return fmt.Errorf("image %s: %w", image.Name, err)
		}
	}
	return tarball.MultiWriteToFile(path, tagged)
}

// build returns the image. It takes a layer of commands from layers, or adds it there.
func (i Image) build(ctx context.Context, layers map[string]v1.Layer) (v1.Image, error) {
	var parts []v1.Layer
	if key := strings.Join(i.Commands, " "); key != "" {
		if layers[key] == nil {
			files, err := commandFiles(ctx, i.Commands)
			if err != nil {
				return nil, err
			}
			if layers[key], err = newLayer(files); err != nil {
				return nil, err
			}
		}
		parts = append(parts, layers[key])
	}
	own := []file{{path: i.Entrypoint, source: i.Binary}}
	for _, path := range slices.Sorted(maps.Keys(i.Files)) {
		own = append(own, file{path: path, source: i.Files[path]})
	}
	binary, err := newLayer(own)
	if err != nil {
		return nil, err
	}
	image, err := mutate.AppendLayers(empty.Image, append(parts, binary)...)
	if err != nil {
		return nil, err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", runtime.GOARCH
	config.Config.Entrypoint, config.Config.Cmd = []string{i.Entrypoint}, i.Args
	config.Config.Env = []string{"PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	return mutate.ConfigFile(image, config)
}

// file is a file of an image: a copy of source, a symbolic link to link, or a folder.
type file struct{ path, source, link string }

// newLayer returns a layer with files. It is not compressed, because it is read once.
func newLayer(files []file) (v1.Layer, error) {
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		reader, writer := io.Pipe()
		go func() { writer.CloseWithError(writeTar(writer, files)) }()
		return reader, nil
	}, tarball.WithCompressionLevel(gzip.NoCompression))
}

func writeTar(to io.Writer, files []file) error {
	out := tar.NewWriter(to)
	for _, f := range files {
		if err := writeFile(out, f); err != nil {
			return err
		}
	}
	return out.Close()
}

func writeFile(out *tar.Writer, f file) error {
	header := &tar.Header{Name: strings.TrimPrefix(f.path, "/"), Mode: 0o755, Typeflag: tar.TypeReg}
	switch {
	case f.link != "":
		header.Typeflag, header.Linkname = tar.TypeSymlink, f.link
		return out.WriteHeader(header)
	case f.source == "":
		header.Typeflag, header.Mode = tar.TypeDir, 0o1777
		return out.WriteHeader(header)
	}
	content, err := os.Open(f.source)
	if err != nil {
		return err
	}
	defer content.Close()
	info, err := content.Stat()
	if err != nil {
		return err
	}
	header.Size = info.Size()
	if err := out.WriteHeader(header); err != nil {
		return err
	}
	_, err = io.Copy(out, content)
	return err
}

// commandFiles returns the files of commands with the libraries that they need, each at its place.
func commandFiles(ctx context.Context, commands []string) ([]file, error) {
	c := collector{seen: map[string]bool{}}
	c.files = append(c.files, file{path: "/tmp"}, file{path: "/run"})
	for _, dir := range []string{"/bin", "/sbin", "/lib", "/lib64"} {
		if link, err := os.Readlink(dir); err == nil {
			c.files = append(c.files, file{path: dir, link: link})
		}
	}
	for _, command := range commands {
		path, err := exec.LookPath(command)
		if err != nil {
			return nil, err
		}
		if err := c.add(ctx, path); err != nil {
			return nil, err
		}
		if command == "nft" {
			// Without the names of protocols, nft lists numbers, and a kube-proxy that starts again does
			// not recognize the elements of its own maps.
			c.files = append(c.files, file{path: protocols, source: protocols})
		}
		if strings.HasPrefix(command, "iptables") {
			extensions, _ := filepath.Glob("/usr/lib/*/xtables/*.so") // the pattern is valid
			for _, extension := range extensions {
				if err := c.add(ctx, extension); err != nil {
					return nil, err
				}
			}
		}
	}
	return c.files, nil
}

// collector collects files and what they need.
type collector struct {
	files []file
	seen  map[string]bool
}

// library finds the path of a library in a line of ldd.
var library = regexp.MustCompile(`(/\S+) \(0x`)

// add adds a program or a library with its libraries, and the targets of symbolic links.
func (c *collector) add(ctx context.Context, path string) error {
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if err != nil {
		return err
	}
	path = filepath.Join(dir, filepath.Base(path))
	if c.seen[path] {
		return nil
	}
	c.seen[path] = true
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	if info.Mode()&fs.ModeSymlink != 0 {
		link, err := os.Readlink(path)
		if err != nil {
			return err
		}
		c.files = append(c.files, file{path: path, link: link})
		if !filepath.IsAbs(link) {
			link = filepath.Join(dir, link)
		}
		return c.add(ctx, link)
	}
	c.files = append(c.files, file{path: path, source: path})
	cmd := exec.CommandContext(ctx, "ldd", path)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil && strings.Contains(stderr.String()+string(out), "not a dynamic executable") {
		return nil
	}
	if err != nil {
		return fmt.Errorf("ldd %s: %w: %s", path, err, stderr.String())
	}
	lines := bufio.NewScanner(strings.NewReader(string(out)))
	var errs []error
	for lines.Scan() {
		if found := library.FindStringSubmatch(lines.Text()); found != nil {
			errs = append(errs, c.add(ctx, found[1]))
		}
	}
	return errors.Join(errs...)
}
