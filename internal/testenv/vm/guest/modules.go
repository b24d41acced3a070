package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/testenv/vm/spec"
)

// modprobe loads the modules of the given names or aliases, with those that they depend on. The kernel calls it when
// something asks for what is not there, e.g. an iptables match.
func modprobe(args []string) error {
	text, err := os.ReadFile(keptAt + "/" + spec.File)
	if err != nil {
		return err
	}
	var s spec.Spec
	if err := json.Unmarshal(text, &s); err != nil {
		return err
	}
	for _, name := range args {
		if strings.HasPrefix(name, "-") {
			continue
		}
		files, ok := s.Modules.Find(name)
		if !ok {
			return fmt.Errorf("no module %s", name)
		}
		for _, file := range files {
			if err := load(file); err != nil {
				return err
			}
		}
	}
	return nil
}

// load loads one module, whose dependencies have been; that it is there already is fine.
func load(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // only read
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("load %s: %w", file, err)
	}
	return nil
}
