// This file is a node's disk: what is not synchronized is lost with the power, or torn.
package simulate

import (
	"bytes"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/slicecast/slicecast/agent/client/checkpoint"
)

// directory is the directory of checkpointPath, which is the path of the checkpoint.
const directory, checkpointPath = "/var/lib/slicecast", "/var/lib/slicecast/state"

// disk holds the files of one directory.
type disk struct {
	mu      sync.Mutex       // guards all fields
	files   map[string]*file // as processes see them
	durable map[string]*file // names that survive a power failure
	full    bool             // writes fail
	// kept has earlier checkpoints, oldest first.
	kept [][]byte
}

// file is the content of a file.
type file struct {
	content []byte
	synced  int // bytes that survive a power failure
}

func newDisk() *disk { return &disk{files: make(map[string]*file), durable: make(map[string]*file)} }

// fail loses what is not durable. Of a file that was not synchronized, a part is left.
func (d *disk) fail() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.files = make(map[string]*file)
	for name, f := range d.durable {
		d.files[name] = &file{content: slices.Clone(f.content[:f.synced]), synced: f.synced}
		d.durable[name] = d.files[name]
	}
}

// put replaces the checkpoint; nil removes it.
func (d *disk) put(content []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.files, checkpointPath)
	delete(d.durable, checkpointPath)
	if content != nil {
		f := &file{content: slices.Clone(content), synced: len(content)}
		d.files[checkpointPath], d.durable[checkpointPath] = f, f
	}
}

// mounted is a process's access to a disk. It ends with the process.
type mounted struct {
	*disk
	process *process
}

var _ checkpoint.Disk = mounted{}

func (m mounted) err(name string) error {
	if m.process.hasEnded() {
		return &fs.PathError{Op: "access", Path: name, Err: errEnded}
	}
	return nil
}

type info struct {
	name string
	size int64
	dir  bool
}

func (i info) Name() string       { return path.Base(i.name) }
func (i info) Size() int64        { return i.size }
func (i info) ModTime() time.Time { return time.Time{} }
func (i info) IsDir() bool        { return i.dir }
func (i info) Sys() any           { return nil }

func (i info) Mode() fs.FileMode {
	if i.dir {
		return fs.ModeDir | 0o700
	}
	return 0o600
}

// Stat implements checkpoint.Disk.
func (m mounted) Stat(name string) (fs.FileInfo, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f := m.files[name]
	switch {
	case name == directory:
		return info{name: name, dir: true}, nil
	case f == nil:
		return nil, &fs.PathError{Op: "stat", Path: name, Err: fs.ErrNotExist}
	}
	return info{name: name, size: int64(len(f.content))}, nil
}

// Open implements checkpoint.Disk.
func (m mounted) Open(name string) (io.ReadCloser, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f := m.files[name]
	if f == nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return io.NopCloser(bytes.NewReader(f.content)), nil
}

// Create implements checkpoint.Disk.
func (m mounted) Create(name string) (checkpoint.File, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.err(name); err != nil {
		return nil, err
	}
	f := &file{}
	m.files[name] = f
	return &openFile{m, name, f}, nil
}

// Rename implements checkpoint.Disk.
func (m mounted) Rename(from, to string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.err(from); err != nil {
		return err
	}
	f := m.files[from]
	if f == nil {
		return &fs.PathError{Op: "rename", Path: from, Err: fs.ErrNotExist}
	}
	delete(m.files, from)
	m.files[to] = f
	if to == checkpointPath {
		if m.kept = append(m.kept, slices.Clone(f.content)); len(m.kept) > 8 {
			m.kept = m.kept[1:]
		}
	}
	// Without SyncDirectory, the new name may be durable or not. It is if the content is not, which is
	// the worse case.
	if f.synced < len(f.content) {
		m.durable[to] = f
	}
	return nil
}

// Remove implements checkpoint.Disk.
func (m mounted) Remove(name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.err(name); err != nil {
		return err
	}
	if m.files[name] == nil {
		return &fs.PathError{Op: "remove", Path: name, Err: fs.ErrNotExist}
	}
	delete(m.files, name)
	delete(m.durable, name)
	return nil
}

// SyncDirectory implements checkpoint.Disk.
func (m mounted) SyncDirectory(string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.durable)
	maps.Copy(m.durable, m.files)
	return nil
}

// openFile implements checkpoint.File.
type openFile struct {
	mounted
	name string
	file *file
}

// Write implements checkpoint.File.
func (f *openFile) Write(b []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.err(f.name); err != nil {
		return 0, err
	}
	if f.full {
		n := len(b) / 2
		f.file.content = append(f.file.content, b[:n]...)
		f.process.write(n)
		return n, &fs.PathError{Op: "write", Path: f.name, Err: syscall.ENOSPC}
	}
	f.file.content = append(f.file.content, b...)
	f.process.write(len(b))
	return len(b), nil
}

// Sync implements checkpoint.File.
func (f *openFile) Sync() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.err(f.name); err != nil {
		return err
	}
	f.process.write(f.file.synced - len(f.file.content))
	f.file.synced = len(f.file.content)
	return nil
}

// Close implements checkpoint.File.
func (f *openFile) Close() error { return f.err(f.name) }
