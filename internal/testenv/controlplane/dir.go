package controlplane

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

const (
	dirPrefix = "slicecast-controlplane-"
	lockName  = "lock"
)

// makeDir creates a directory for one control plane in parent, which is that of temporary files if
// it is empty. It first removes the directories of killed
// test runs: the owner of a directory holds a lock in it, and the kernel releases the lock when the
// owner ends.
func makeDir(parent string) (string, *os.File, error) {
	if parent == "" {
		parent = os.TempDir()
	}
	stale, err := filepath.Glob(filepath.Join(parent, dirPrefix+"*"))
	if err != nil {
		return "", nil, err
	}
	for _, dir := range stale {
		if lock, err := os.Open(filepath.Join(dir, lockName)); err == nil {
			if tryLock(lock) == nil {
				_ = os.RemoveAll(dir) // another test process may be removing it, too
			}
			lock.Close()
		}
	}
	dir, err := os.MkdirTemp(parent, dirPrefix)
	if err != nil {
		return "", nil, err
	}
	// The lock gets its final name only once it is held, so that nobody else takes it before.
	lock, err := os.CreateTemp(dir, lockName)
	if err != nil {
		return "", nil, err
	}
	if err := tryLock(lock); err != nil {
		return "", nil, err
	}
	return dir, lock, os.Rename(lock.Name(), filepath.Join(dir, lockName))
}

func tryLock(file *os.File) error {
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return fmt.Errorf("lock %s: %w", file.Name(), err)
	}
	return nil
}
