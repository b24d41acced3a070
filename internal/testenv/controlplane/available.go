package controlplane

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/slicecast/slicecast/internal/testenv/repository"
)

// Available returns an error if nothing can provide the binaries of an API server: neither a folder
// that has them nor this repository. It does not build or download anything.
func Available() error {
	dir := os.Getenv(BinariesVariable)
	if dir == "" {
		if _, err := repository.Root(); err != nil {
			return fmt.Errorf("%w, after make setup, or set $%s to a folder that contains etcd and kube-apiserver", err, BinariesVariable)
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
