// Package repository finds the sources of this module, which some tests build programs from.
package repository

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
)

// Root returns the folder of the root module. It searches upwards from the working directory, which
// for a test is the folder of its package.
func Root() (string, error) {
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
