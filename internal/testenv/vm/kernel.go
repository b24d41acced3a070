package vm

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/slicecast/slicecast/internal/testenv/vm/spec"
)

// bootModules is what the machine needs to read the host's files and to write to its ports.
var bootModules = []string{"virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay"}

// kernel is an unpacked kernel package.
type kernel struct {
	image   string
	modules spec.Modules
}

// findKernel has the kernel unpacked, if it is not yet, and looks through its modules.
func findKernel(ctx context.Context, root string) (*kernel, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(root, "internal/tools/kernel.sh"))
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("internal/tools/kernel.sh (its own output says more): %w", err)
	}
	dir := strings.TrimSpace(string(out))
	k := &kernel{image: filepath.Join(dir, "vmlinuz"), modules: spec.Modules{}}
	err = filepath.WalkDir(filepath.Join(dir, "modules"), func(path string, _ fs.DirEntry, err error) error {
		name, isModule := strings.CutSuffix(filepath.Base(path), ".ko")
		if err != nil || !isModule {
			return err
		}
		m, err := readModule(path)
		k.modules[spec.Plain(name)] = m
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("look through the kernel's modules: %w; remove %s to have them unpacked anew", err, dir)
	}
	return k, nil
}

// readModule reads what a module's file says of it.
func readModule(path string) (*spec.Module, error) {
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
	m := &spec.Module{File: path}
	for field := range bytes.SplitSeq(text, []byte{0}) {
		key, value, _ := strings.Cut(string(field), "=")
		switch {
		case key == "depends" && value != "":
			for name := range strings.SplitSeq(value, ",") {
				m.Depends = append(m.Depends, spec.Plain(name))
			}
		case key == "alias":
			m.Aliases = append(m.Aliases, value)
		}
	}
	return m, nil
}

// firstFiles gives the machine's first file system: the guest program, as init and as modprobe, the spec, and the
// modules to begin with.
func (k *kernel) firstFiles(guest string, s spec.Spec, encode func(any) ([]byte, error)) ([]byte, error) {
	var a archive
	program, err := os.ReadFile(guest)
	if err != nil {
		return nil, err
	}
	a.add("init", 0o100755, program)
	a.add("bin", 0o040755, nil)
	a.add("bin/modprobe", 0o120777, []byte("../init"))
	a.add("dev", 0o040755, nil)
	seen := map[string]bool{}
	for _, name := range bootModules {
		files, ok := k.modules.Find(name)
		if !ok {
			return nil, fmt.Errorf("the kernel has no module %s: remove %s to have another unpacked", name, filepath.Dir(k.image))
		}
		for _, file := range files {
			if seen[file] {
				continue
			}
			seen[file] = true
			content, err := os.ReadFile(file)
			if err != nil {
				return nil, err
			}
			a.add(filepath.Base(file), 0o100644, content)
			s.Boot = append(s.Boot, file)
		}
	}
	s.Modules = k.modules
	text, err := encode(s)
	if err != nil {
		return nil, err
	}
	a.add(spec.File, 0o100644, text)
	return a.finish(), nil
}

// repositoryRoot finds the module's folder above the working directory, which for a test is its package's folder.
func repositoryRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		goMod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && bytes.HasPrefix(goMod, []byte("module github.com/slicecast/slicecast\n")) {
			return dir, nil
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return "", err
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("the working directory is not inside the slicecast repository: run there")
		}
		dir = parent
	}
}
