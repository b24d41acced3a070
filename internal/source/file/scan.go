package file

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const (
	// settle is how long a file's content or absence must be unchanged before it is accepted. The
	// file may be half written, or between two renames of an editor.
	settle = 50 * time.Millisecond
	// settleEmpty replaces settle for a file that had objects and is empty, as it is most likely
	// about to be written.
	settleEmpty = time.Second
	// patience is after how long a file that keeps changing is accepted as it is.
	patience = 10 * settle
)

// files has the accepted content of a directory's manifests.
type files struct {
	directory string
	parser    parser
	known     map[string]*file
	pending   map[string]*pending
	problem   *problem  // a problem with the directory itself
	strange   []problem // entries that are named like manifests and are not files
}

// file is one file with manifests.
type file struct {
	raw      []byte
	objects  []*object
	problems []problem
	// unread is the first problem because of which an object may be missing; empty if there is none.
	unread string
}

// pending is a change that is not accepted yet.
type pending struct {
	raw   []byte // nil if the file is missing
	since time.Time
	first time.Time // when the file first differed from its accepted content
}

// scan reads the directory. It returns after how long to do so again, and whether all content is
// accepted. While the directory cannot be read, the accepted content stays.
func (f *files) scan() (wait time.Duration, settled bool) {
	entries, err := os.ReadDir(f.directory)
	if err != nil {
		f.problem = &problem{file: f.directory, detail: fmt.Sprintf("cannot read the directory, keeping its last content: %v", err)}
		return absence, false
	}
	f.problem, f.strange = nil, nil

	now, seen := time.Now(), map[string]bool{}
	wait = rescan
	for _, e := range entries {
		name := e.Name()
		switch filepath.Ext(name) {
		case ".yaml", ".yml", ".json":
		default:
			continue
		}
		if strings.HasPrefix(name, ".") {
			continue
		}
		raw, exists, err := f.read(name)
		if !exists {
			continue
		}
		seen[name] = true
		if err != nil {
			f.fail(name, err)
			continue
		}
		wait = min(wait, f.see(name, raw, now))
	}
	for name := range f.known {
		if !seen[name] {
			wait = min(wait, f.see(name, nil, now))
		}
	}
	for name := range f.pending {
		if !seen[name] && f.known[name] == nil {
			delete(f.pending, name)
		}
	}
	return wait, len(f.pending) == 0
}

// read returns the content of a file. If the entry of that name is not a regular file, read records
// this as strange.
func (f *files) read(name string) (raw []byte, exists bool, err error) {
	path := filepath.Join(f.directory, name)
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		f.strange = append(f.strange, problem{file: name, detail: "is not a regular file: manifests are read only from files in this directory, not from subdirectories"})
		return nil, false, nil
	}
	raw, err = os.ReadFile(path)
	if !os.IsNotExist(err) {
		return raw, true, err
	}
	if info, err := os.Lstat(path); err == nil && info.Mode()&os.ModeSymlink != 0 {
		f.strange = append(f.strange, problem{file: name, detail: "is a broken link: correct or remove it"})
	}
	return nil, false, nil
}

// fail records that a file cannot be read. Its objects stay.
func (f *files) fail(name string, err error) {
	delete(f.pending, name)
	if f.known[name] == nil {
		f.known[name] = &file{}
	}
	f.known[name].raw = nil
	f.known[name].problems = []problem{{file: name, detail: fmt.Sprintf("cannot be read: %v; make it readable for this process", err)}}
}

// see compares a file's content with the accepted one. raw is nil if the file is missing. see
// returns after how long to look again.
func (f *files) see(name string, raw []byte, now time.Time) time.Duration {
	known := f.known[name]
	if known != nil && raw != nil && known.raw != nil && bytes.Equal(known.raw, raw) {
		delete(f.pending, name)
		return rescan
	}
	p := f.pending[name]
	if p == nil {
		p = &pending{raw: raw, since: now, first: now}
		f.pending[name] = p
	} else if (p.raw == nil) != (raw == nil) || !bytes.Equal(p.raw, raw) {
		p.raw, p.since = raw, now
	}
	need := settle
	if raw != nil && len(bytes.TrimSpace(raw)) == 0 && known != nil && len(known.objects) > 0 {
		need = settleEmpty
	}
	if age := now.Sub(p.since); age < need && now.Sub(p.first) < max(need, patience) {
		return need - age
	}
	delete(f.pending, name)
	if raw == nil {
		delete(f.known, name)
		return rescan
	}
	f.known[name] = f.parser.parse(name, raw, known)
	return rescan
}
