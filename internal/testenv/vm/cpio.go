package vm

import (
	"bytes"
	"fmt"
)

// archive is a cpio archive in the format of Linux's initial file system ("newc"; see
// Documentation/driver-api/early-userspace/buffer-format.rst in the kernel).
type archive struct {
	bytes.Buffer
	inode int
}

// add adds a file. mode includes the type of the file.
func (a *archive) add(name string, mode uint32, content []byte) {
	a.inode++
	a.WriteString(fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		a.inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name)+1, 0))
	a.WriteString(name + "\x00")
	a.pad()
	a.Write(content)
	a.pad()
}

func (a *archive) pad() {
	for a.Len()%4 != 0 {
		a.WriteByte(0)
	}
}

// finish adds the trailer and returns the archive.
func (a *archive) finish() []byte {
	a.add("TRAILER!!!", 0, nil)
	return a.Bytes()
}
