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
	// settle is how long a file's content must stay the same, or the file missing, to be believed: it may be half written,
	// or between an editor's two renames.
	settle = 50 * time.Millisecond
	// settleEmpty is settle for a file that held something and is empty: it is most likely about to be written.
	settleEmpty = time.Second
	// patience is when a file that changes all the time is taken as it is.
	patience = 10 * settle
)

// files are the manifests of a directory as they were last believed to be.
type files struct {
	directory string
	parser    parser
	known     map[string]*file
	pending   map[string]*pending
	problem   *problem  // of the directory itself
	strange   []problem // of what is no file, though its name is a manifest's
}

// file is one file with manifests.
type file struct {
	raw      []byte
	objects  []*object
	problems []problem
}

// pending is a change that is not believed yet.
type pending struct {
	raw   []byte // nil: the file is missing
	since time.Time
	first time.Time // of the changes since the file was last settled
}

// scan reads the directory and tells when to do so again, and whether all that is in it is settled. While the directory
// cannot be read, everything stays as it was.
func (f *files) scan() (wait time.Duration, settled bool) {
	entries, err := os.ReadDir(f.directory)
	if err != nil {
		f.problem = &problem{file: f.directory, detail: fmt.Sprintf("the directory is gone, keeping what it held: %v", err)}
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
		path := filepath.Join(f.directory, name)
		if strings.HasPrefix(name, ".") {
			continue
		}
		if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
			f.strange = append(f.strange, problem{file: name, detail: "is no file: manifests are read from the files in this directory, and from none below it"})
			continue
		}
		raw, err := os.ReadFile(path)
		if os.IsNotExist(err) {
			if info, err := os.Lstat(path); err == nil && info.Mode()&os.ModeSymlink != 0 {
				f.strange = append(f.strange, problem{file: name, detail: "is a link that leads nowhere: correct or remove it"})
			}
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

// fail notes that a file cannot be read; what it held stays.
func (f *files) fail(name string, err error) {
	delete(f.pending, name)
	if f.known[name] == nil {
		f.known[name] = &file{}
	}
	f.known[name].raw = nil
	f.known[name].problems = []problem{{file: name, detail: fmt.Sprintf("cannot be read: %v; make it readable for this process", err)}}
}

// see takes what a file holds now, nil if it is missing, and tells when to look again.
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
