package vm

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/internal/testenv/vm/spec"
)

// bootModules are the modules that the machine needs to read the host's files, write to its ports
// and reach its network.
var bootModules = []string{"virtio_pci", "virtio_console", "virtio_net", "9pnet_virtio", "9p", "overlay"}

// kernel is an unpacked kernel package.
type kernel struct {
	image   string
	modules map[string]*module
}

// module is one kernel module.
type module struct {
	file    string
	depends []string
	// aliases are the names by which the kernel requests the module.
	aliases []string
}

// findKernel unpacks the kernel, unless that is done already, and reads the descriptions of its
// modules.
func findKernel(ctx context.Context, root string) (*kernel, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(root, "internal/tools/kernel.sh"))
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("internal/tools/kernel.sh (see its output): %w", err)
	}
	dir := strings.TrimSpace(string(out))
	k := &kernel{image: filepath.Join(dir, "vmlinuz"), modules: map[string]*module{}}
	err = filepath.WalkDir(filepath.Join(dir, "modules"), func(path string, _ fs.DirEntry, err error) error {
		name, isModule := strings.CutSuffix(filepath.Base(path), ".ko")
		if err != nil || !isModule {
			return err
		}
		k.modules[plain(name)], err = readModule(path)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read the kernel's modules: %w; remove %s to unpack them again", err, dir)
	}
	return k, nil
}

// plain returns a module's name as the kernel spells it. File names may have - in place of _.
func plain(name string) string { return strings.ReplaceAll(name, "-", "_") }

func readModule(path string) (*module, error) {
	f, err := elf.Open(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	defer f.Close() //nolint:errcheck // only read
	section := f.Section(".modinfo")
	if section == nil {
		return nil, fmt.Errorf("%s has no section .modinfo", path)
	}
	text, err := section.Data()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	m := &module{file: path}
	for field := range bytes.SplitSeq(text, []byte{0}) {
		key, value, _ := strings.Cut(string(field), "=")
		switch {
		case key == "depends" && value != "":
			for name := range strings.SplitSeq(value, ",") {
				m.depends = append(m.depends, plain(name))
			}
		case key == "alias":
			m.aliases = append(m.aliases, value)
		}
	}
	return m, nil
}

// files returns the files to load for a module, in order. It returns none for a module that is
// built in.
func (k *kernel) files(name string) (files []string) {
	m := k.modules[name]
	if m == nil {
		return nil
	}
	for _, d := range m.depends {
		for _, file := range k.files(d) {
			if !slices.Contains(files, file) {
				files = append(files, file)
			}
		}
	}
	return append(files, m.file)
}

// index returns the content of spec.ModulesFile. If several modules have the same alias, they are
// alternatives for the same purpose, and index uses the first one by name.
func (k *kernel) index() []byte {
	var b bytes.Buffer
	b.WriteString("\n")
	seen := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(k.modules)) {
		files := strings.Join(k.files(name), " ")
		for _, alias := range append(k.modules[name].aliases, name) {
			if !seen[alias] {
				seen[alias] = true
				b.WriteString(alias + " " + files + "\n")
			}
		}
	}
	return b.Bytes()
}

// firstFiles returns the machine's initial file system: the guest program, as init and as modprobe,
// its Spec, and the modules for the boot.
func (k *kernel) firstFiles(guest string, ports []uint16, runs []spec.Run) ([]byte, error) {
	var a archive
	program, err := os.ReadFile(guest)
	if err != nil {
		return nil, err
	}
	a.add("init", 0o100755, program)
	a.add("bin", 0o040755, nil)
	a.add("bin/modprobe", 0o120777, []byte("../init"))
	a.add("dev", 0o040755, nil)
	s := spec.Spec{Ports: ports, Runs: runs}
	for _, name := range bootModules {
		files := k.files(name)
		if len(files) == 0 {
			return nil, fmt.Errorf("the kernel has no module %s: remove %s to unpack another kernel", name, filepath.Dir(k.image))
		}
		for _, file := range files {
			if slices.Contains(s.Boot, file) {
				continue
			}
			content, err := os.ReadFile(file)
			if err != nil {
				return nil, err
			}
			a.add(filepath.Base(file), 0o100644, content)
			s.Boot = append(s.Boot, file)
		}
	}
	text, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	a.add(spec.File, 0o100644, text)
	a.add(spec.ModulesFile, 0o100644, k.index())
	return a.finish(), nil
}
