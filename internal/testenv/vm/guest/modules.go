package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/testenv/vm/spec"
)

// modprobe loads the modules with the given names or aliases, after those that they depend on. The
// kernel calls it when something needs a missing module, such as an iptables match.
func modprobe(args []string) error {
	index, err := os.ReadFile(spec.KeptAt + "/" + spec.ModulesFile)
	if err != nil {
		return err
	}
	for _, name := range args {
		if strings.HasPrefix(name, "-") {
			continue
		}
		_, line, ok := bytes.Cut(index, []byte("\n"+name+" "))
		if !ok {
			return fmt.Errorf("no module %s", name)
		}
		line, _, _ = bytes.Cut(line, []byte("\n"))
		for file := range strings.FieldsSeq(string(line)) {
			if err := load(file); err != nil {
				return err
			}
		}
	}
	return nil
}

// load loads one module whose dependencies have been loaded. It returns nil if the module is loaded
// already.
func load(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("load %s: %w", file, err)
	}
	return nil
}
