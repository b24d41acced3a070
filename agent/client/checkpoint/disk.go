package checkpoint

import (
	"errors"
	"io"
	"io/fs"
	"os"
)

// Disk is the part of a file system that a Checkpoint uses. Its errors are those of package os.
type Disk interface {
	// Stat describes a file or a directory.
	Stat(path string) (fs.FileInfo, error)
	// Open opens a file for reading.
	Open(path string) (io.ReadCloser, error)
	// Create opens a file for writing. The file is empty, and only its owner may read it.
	Create(path string) (File, error)
	// Rename renames a file. A file that has the new name is replaced.
	Rename(from, to string) error
	// Remove removes a file.
	Remove(path string) error
	// SyncDirectory returns once the names in a directory survive a power failure.
	SyncDirectory(path string) error
}

// File is an open file of a Disk.
type File interface {
	io.WriteCloser
	// Sync returns once what was written survives a power failure.
	Sync() error
}

// system is the operating system's files.
type system struct{}

var _ Disk = system{}

// Stat implements Disk.
func (system) Stat(path string) (fs.FileInfo, error) { return os.Stat(path) }

// Open implements Disk.
func (system) Open(path string) (io.ReadCloser, error) { return os.Open(path) }

// Create implements Disk.
func (system) Create(path string) (File, error) {
	return os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
}

// Rename implements Disk.
func (system) Rename(from, to string) error { return os.Rename(from, to) }

// Remove implements Disk.
func (system) Remove(path string) error { return os.Remove(path) }

// SyncDirectory implements Disk.
func (system) SyncDirectory(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
