package controlplane

import (
	"fmt"
	"os"
	"path/filepath"
)

// Available tells, without building or fetching anything, whether there is where an API server's binaries could be from: a folder that has
// them, or this repository.
func Available() error {
	dir := os.Getenv(BinariesVariable)
	if dir == "" {
		if _, err := repositoryRoot(); err != nil {
			return fmt.Errorf("%w, after make setup, or set $%s to a folder that has etcd and kube-apiserver", err, BinariesVariable)
		}
		return nil
	}
	for _, name := range []string{"etcd", "kube-apiserver"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("$%s: %w", BinariesVariable, err)
		}
	}
	return nil
}
