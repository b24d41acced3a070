package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"pault.ag/go/debian/deb"
)

//go:embed packages.txt
var pinned string

// The addresses in packages.txt begin with mirror. It removes old versions of packages, which
// archive keeps below the time of a snapshot.
const (
	mirror  = "http://deb.debian.org/"
	archive = "https://snapshot.debian.org/archive/"
)

// debian fetches pinned Debian packages.
type debian struct {
	packages []pin
	snapshot string // when the packages were pinned
	cache    string // folder with the packages that have been fetched, by hash
	mirror   string
	archive  string
}

// pin is a package of a layer for one architecture.
type pin struct{ layer, architecture, hash, url string }

// newDebian returns the packages in packages.txt, which it keeps in the cache of the tools.
func newDebian() (*debian, error) {
	cache := os.Getenv("SLICECAST_CACHE")
	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return nil, err
		}
		cache = filepath.Join(user, "slicecast")
	}
	d := &debian{cache: filepath.Join(cache, "debian"), mirror: mirror, archive: archive}
	for line := range strings.Lines(pinned) {
		switch f := strings.Fields(line); {
		case strings.HasPrefix(line, "#"):
		case len(f) == 2 && f[0] == "snapshot":
			d.snapshot = f[1]
		case len(f) == 4:
			d.packages = append(d.packages, pin{layer: f[0], architecture: f[1], hash: f[2], url: f[3]})
		default:
			return nil, fmt.Errorf("packages.txt: unknown line %q: write the file with pin.sh", line)
		}
	}
	return d, nil
}

// unpacked is what the packages of a layer hold.
type unpacked struct {
	files    files
	packages []deb.Control
	layer    v1.Layer // the packed files, for all images with these packages; nil before pack
}

// pack packs the files. They do not change after this.
func (u *unpacked) pack() (_ v1.Layer, err error) {
	if u.layer == nil {
		u.layer, err = u.files.pack()
	}
	return u.layer, err
}

// layer fetches and unpacks the packages of a layer.
func (d *debian) layer(ctx context.Context, name, architecture string) (*unpacked, error) {
	u := &unpacked{files: files{}}
	for _, p := range d.packages {
		if p.layer != name || p.architecture != architecture {
			continue
		}
		file, err := d.fetch(ctx, p)
		if err != nil {
			return nil, err
		}
		if err := u.unpack(file); err != nil {
			return nil, fmt.Errorf("unpack %s: %w", file, err)
		}
	}
	return u, nil
}

// fetch returns the path of a package in the cache.
func (d *debian) fetch(ctx context.Context, p pin) (string, error) {
	name := filepath.Join(d.cache, p.hash+".deb")
	if content, err := os.ReadFile(name); err == nil && hash(content) == p.hash {
		return name, nil
	}
	rest := strings.TrimPrefix(p.url, mirror)
	repository, rest, _ := strings.Cut(rest, "/")
	base, err := url.PathUnescape(path.Base(p.url))
	if err != nil {
		return "", err
	}
	progress("fetching %s", base)
	content, err := get(ctx, d.mirror+repository+"/"+rest, p.hash)
	if err != nil {
		progress("the mirror does not have it: %v", err)
		var archiveErr error
		content, archiveErr = get(ctx, d.archive+repository+"/"+d.snapshot+"/"+rest, p.hash)
		if err = errors.Join(err, archiveErr); archiveErr != nil {
			return "", fmt.Errorf("%s: %w: if Debian has replaced the package, run internal/tools/release/pin.sh", base, err)
		}
	}
	if err := os.MkdirAll(d.cache, 0o755); err != nil {
		return "", err
	}
	// Another process may write the same file, so write it under a name of its own first.
	partial, err := os.CreateTemp(d.cache, "partial")
	if err != nil {
		return "", err
	}
	_, err = partial.Write(content)
	if err := errors.Join(err, partial.Close(), os.Rename(partial.Name(), name)); err != nil {
		return "", err
	}
	return name, nil
}

// get reads a file with the hash from an address.
func get(ctx context.Context, address, want string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, http.NoBody)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", address, response.Status)
	}
	content, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, err
	}
	if got := hash(content); got != want {
		return nil, fmt.Errorf("%s: SHA-256 is %s instead of %s", address, got, want)
	}
	return content, nil
}

func hash(content []byte) string {
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:])
}

// unpack adds the files of a package, and the record by which scanners find the package in an image
// without dpkg.
func (u *unpacked) unpack(name string) error {
	d, closeFile, err := deb.LoadFile(name)
	if err != nil {
		return err
	}
	defer func() { _ = closeFile() }() // it was only read
	for {
		header, err := d.Data.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		path := path.Clean(strings.TrimPrefix(header.Name, "./"))
		if path == "." || !needed(path) {
			continue
		}
		content, err := io.ReadAll(d.Data)
		if err != nil {
			return err
		}
		u.files[path] = file{
			kind: header.Typeflag, mode: header.Mode, target: header.Linkname, time: header.ModTime, content: content,
		}
	}
	var status bytes.Buffer
	// The description of iptables ends with an empty line, which would end the record.
	d.Control.Order = append([]string{"Status"}, d.Control.Order...)
	d.Control.Values["Status"] = "install ok installed"
	if err := d.Control.WriteTo(&status); err != nil {
		return err
	}
	u.files.add("var/lib/dpkg/status.d/"+d.Control.Package, status.String())
	u.packages = append(u.packages, d.Control)
	return nil
}

// needed reports whether images need a file of a package. They leave out what is for people and for
// package managers, but keep licenses.
func needed(path string) bool {
	if share, ok := strings.CutPrefix(path, "usr/share/"); ok {
		top, rest, _ := strings.Cut(share, "/")
		switch top {
		case "ca-certificates", "common-licenses":
			return true
		case "zoneinfo":
			return rest != "localtime" // a link to a file that images do not have
		case "doc":
			return strings.HasSuffix(rest, "/copyright")
		}
		return false
	}
	for _, dropped := range []string{"boot", "etc/ca-certificates", "usr/games", "usr/include", "usr/sbin/update-ca-certificates"} {
		if path == dropped || strings.HasPrefix(path, dropped+"/") {
			return false
		}
	}
	return !strings.Contains(path, "/gconv") // libc's character sets
}

// configureBase does what the packages' scripts do when they are installed, and adds the users.
func (u *unpacked) configureBase() error {
	var certificates bytes.Buffer
	for _, name := range slices.Sorted(maps.Keys(u.files)) {
		if strings.HasPrefix(name, "usr/share/ca-certificates/") && strings.HasSuffix(name, ".crt") {
			certificates.Write(u.files[name].content)
		}
	}
	if certificates.Len() == 0 {
		return errors.New("the package ca-certificates has no certificates: look at its new form")
	}
	maps.DeleteFunc(u.files, func(name string, f file) bool {
		return strings.HasPrefix(name, "usr/share/ca-certificates") && f.kind != tar.TypeDir
	})
	u.files.add("etc/ssl/certs/ca-certificates.crt", certificates.String())
	u.files.add("etc/passwd", "root:x:0:0:root:/root:/sbin/nologin\n"+
		"nobody:x:65534:65534:nobody:/nonexistent:/sbin/nologin\n"+
		"nonroot:x:65532:65532:nonroot:/nonexistent:/sbin/nologin\n")
	u.files.add("etc/group", "root:x:0:\nnogroup:x:65534:\nnonroot:x:65532:\n")
	return nil
}

// configureIPTables makes the nft variant the default, as Debian does. The agent names the variant
// that it is configured for, so that no wrapper has to choose one.
func (u *unpacked) configureIPTables() {
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, program := range []string{"", "-save", "-restore"} {
			u.files.link("usr/sbin/"+family+program, family+"-nft"+program)
		}
	}
}
