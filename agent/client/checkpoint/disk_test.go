// This test proves that a power failure at any moment of a save leaves the old file or the new one,
// whole, and that a save that has returned is not lost.
package checkpoint

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"maps"
	"testing"

	"github.com/stretchr/testify/require"
)

var errPower = errors.New("no power")

// volatile is a disk that loses its power after some operations. Then only content that was
// synchronized is left, under names that were. If eager is set, a new name survives at once, which
// a file system may do in its own time.
type volatile struct {
	names, durable map[string]*content
	eager          bool
	left           int // operations until the power is gone
}

type content struct {
	bytes  []byte
	synced int
}

var _ Disk = (*volatile)(nil)

func (v *volatile) use() error {
	if v.left == 0 {
		return errPower
	}
	v.left--
	return nil
}

func (v *volatile) Stat(string) (fs.FileInfo, error)   { return nil, fs.ErrNotExist }
func (v *volatile) Open(string) (io.ReadCloser, error) { return nil, fs.ErrNotExist }

func (v *volatile) Create(path string) (File, error) {
	if err := v.use(); err != nil {
		return nil, err
	}
	v.names[path] = &content{}
	return &volatileFile{v, v.names[path]}, nil
}

func (v *volatile) Rename(from, to string) error {
	if err := v.use(); err != nil {
		return err
	}
	v.names[to] = v.names[from]
	delete(v.names, from)
	if v.eager {
		v.durable[to] = v.names[to]
	}
	return nil
}

func (v *volatile) Remove(path string) error {
	if err := v.use(); err != nil {
		return err
	}
	delete(v.names, path)
	return nil
}

func (v *volatile) SyncDirectory(string) error {
	if err := v.use(); err != nil {
		return err
	}
	v.durable = maps.Clone(v.names)
	return nil
}

type volatileFile struct {
	disk    *volatile
	content *content
}

func (f *volatileFile) Write(b []byte) (int, error) {
	if err := f.disk.use(); err != nil {
		return 0, err
	}
	f.content.bytes = append(f.content.bytes, b...)
	return len(b), nil
}

func (f *volatileFile) Sync() error {
	if err := f.disk.use(); err != nil {
		return err
	}
	f.content.synced = len(f.content.bytes)
	return nil
}

func (f *volatileFile) Close() error { return f.disk.use() }

func TestPowerFailure(t *testing.T) {
	before, after := bytes.Repeat([]byte("before"), 50_000), bytes.Repeat([]byte("afterwards"), 50_000)
	for _, eager := range []bool{false, true} {
		for operations := 0; ; operations++ {
			require.Less(t, operations, 1000, "a save never ends")
			old := &content{before, len(before)}
			v := &volatile{
				names: map[string]*content{"state": old}, durable: map[string]*content{"state": old}, eager: eager, left: operations,
			}
			_, err := replaceFile(v, "state", func(w io.Writer) (int, error) { return w.Write(after) })
			left := v.durable["state"]
			require.NotNil(t, left, "after %d operations, eager: %v", operations, eager)
			got := left.bytes[:left.synced]
			if err == nil {
				require.True(t, bytes.Equal(got, after), "a save that has returned is lost, eager: %v", eager)
				break
			}
			require.ErrorIs(t, err, errPower)
			require.True(t, bytes.Equal(got, before) || bytes.Equal(got, after),
				"after %d operations %d bytes are left, eager: %v", operations, len(got), eager)
		}
	}
}
