package plugin

import (
	"archive/tar"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"html/template"
	"io"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/slicecast/slicecast/internal/plugin/redact"
	"github.com/slicecast/slicecast/internal/show"
)

// maxReportPart and maxReport bound the content of one file of a bug report, and of all files
// together, in bytes before compression.
const maxReportPart, maxReport = 8 << 20, 256 << 20

// archive is a bug report that is being written. Everything in it passes through a Redactor.
type archive struct {
	redact *redact.Redactor
	root   string // the folder in the archive

	mu     sync.Mutex // guards the fields below
	zip    *gzip.Writer
	tar    *tar.Writer
	left   int
	groups []*archiveGroup
	failed error // the first error of writing; nothing is written after it
}

// archiveGroup is what the index lists together.
type archiveGroup struct {
	Name  string
	Files []archiveFile
	// Missing are the parts that could not be had.
	Missing []archiveMiss
}

// archiveFile is a file of the archive.
type archiveFile struct {
	Path, Title, Size string
	// Note says what is wrong with the file, such as that it is cut off.
	Note string
}

// archiveMiss is what could not be had, and why.
type archiveMiss struct{ Group, Title, Reason string }

func newArchive(out io.Writer, root string, redactor *redact.Redactor) *archive {
	zip := gzip.NewWriter(out)
	return &archive{redact: redactor, root: root, zip: zip, tar: tar.NewWriter(zip), left: maxReport}
}

// group returns the group with a name.
func (a *archive) group(name string) *archiveGroup {
	for _, g := range a.groups {
		if g.Name == name {
			return g
		}
	}
	g := &archiveGroup{Name: name}
	a.groups = append(a.groups, g)
	return g
}

// begin makes the index list a group at this place, also if nothing is found for it.
func (a *archive) begin(name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.group(name)
}

// add adds a file, unless there is an error instead of it. With both, the file is incomplete.
func (a *archive) add(group, file, title string, content []byte, err error) {
	a.addWithoutSecrets(group, file, title, a.redact.Text(strings.ToValidUTF8(string(content), "\uFFFD")), err)
}

// addWithoutSecrets adds a file as add does, from which secrets are left out already.
func (a *archive) addWithoutSecrets(group, file, title, text string, err error) {
	reason := ""
	if err != nil {
		reason = a.redact.Text(err.Error())
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	g := a.group(group)
	if text == "" {
		if reason != "" {
			g.Missing = append(g.Missing, archiveMiss{group, title, reason})
		}
		return
	}
	if limit := min(maxReportPart, a.left); len(text) > limit {
		text, reason = text[:limit], strings.TrimPrefix(reason+"; cut off, because it is too long", "; ")
		if limit == 0 {
			g.Missing = append(g.Missing, archiveMiss{group, title, fmt.Sprintf("the archive has %d MiB already", maxReport>>20)})
			return
		}
	}
	a.left -= len(text)
	a.write(file, text)
	g.Files = append(g.Files, archiveFile{Path: file, Title: title, Size: show.Bytes(uint64(len(text))), Note: reason})
}

// write writes a file. The caller holds mu.
func (a *archive) write(file, text string) {
	if a.failed != nil {
		return
	}
	a.failed = a.tar.WriteHeader(&tar.Header{
		Name: path.Join(a.root, file), Mode: 0o600, Size: int64(len(text)), ModTime: time.Now(), Typeflag: tar.TypeReg,
	})
	if a.failed == nil {
		_, a.failed = io.WriteString(a.tar, text)
	}
}

// missing returns how many parts are missing or incomplete.
func (a *archive) missing() (n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, g := range a.groups {
		n += len(g.Missing)
		for _, f := range g.Files {
			if f.Note != "" {
				n++
			}
		}
	}
	return n
}

// finish writes the index and completes the archive.
func (a *archive) finish(index reportIndex) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	index.Groups, index.Sampled = a.groups, a.redact.Text(index.Sampled)
	for i := range index.Nodes {
		n := &index.Nodes[i]
		n.Name, n.State, n.Why = a.redact.Text(n.Name), a.redact.Text(n.State), a.redact.Text(n.Why)
	}
	for _, g := range a.groups {
		index.Missing = append(index.Missing, g.Missing...)
	}
	var page strings.Builder
	if err := indexTemplate.Execute(&page, index); err != nil {
		return fmt.Errorf("index: %w", err)
	}
	a.write("index.html", page.String())
	if err := errors.Join(a.failed, a.tar.Close(), a.zip.Close()); err != nil {
		return fmt.Errorf("write the archive: %w; is the disk full?", err)
	}
	return nil
}

// fileName returns a name as a part of a path. Names that servers choose must not lead elsewhere,
// or be the same as others.
func fileName(name string) string {
	var out strings.Builder
	for _, b := range []byte(name) {
		switch {
		case 'a' <= b && b <= 'z', 'A' <= b && b <= 'Z', '0' <= b && b <= '9', b == '-', b == '_', b == '.' && out.Len() > 0:
			out.WriteByte(b)
		default:
			fmt.Fprintf(&out, "~%02x", b)
		}
	}
	s := out.String()
	if len(s) <= maxFileName {
		return s
	}
	// No other name has this end, because a ~ is written as ~7e.
	sum := sha256.Sum256([]byte(name))
	end := "~~" + hex.EncodeToString(sum[:16])
	return s[:maxFileName-len(end)] + end
}

// maxFileName bounds the length of a file's name, in bytes.
const maxFileName = 200

// reportIndex is what index.html shows.
type reportIndex struct {
	Time, Version, Note, Sampled string
	Nodes                        []sampledNode
	Missing                      []archiveMiss
	Groups                       []*archiveGroup
}

// indexTemplate is the page. It has no scripts and needs nothing from elsewhere.
var indexTemplate = template.Must(template.New("index").Parse(`<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>Bug report of Slicecast, {{.Time}}</title>
<style>
body { font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222; background: #fff }
table { border-collapse: collapse } th, td { text-align: left; padding: .2em 1em .2em 0; vertical-align: top; overflow-wrap: anywhere }
.note { color: #a40000 }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #111 } a { color: #8cf } .note { color: #f99 } }
</style>
</head>
<body>
<h1>Bug report of Slicecast</h1>
<p>Made at {{.Time}} by kubectl slicecast {{.Version}}. Secrets are left out.</p>
{{with .Note}}<p class="note">{{.}}</p>{{end}}
<nav aria-label="Contents"><ul>
<li><a href="#nodes">Nodes</a></li>
<li><a href="#missing">What is missing</a></li>
{{range $i, $g := .Groups}}<li><a href="#group-{{$i}}">{{$g.Name}}</a></li>
{{end}}</ul></nav>
<h2 id="nodes">Nodes</h2>
<p>{{.Sampled}}</p>
{{if .Nodes}}<table>
<tr><th scope="col">Node</th><th scope="col">State</th><th scope="col">Chosen because</th></tr>
{{range .Nodes}}<tr><td>{{.Name}}</td><td>{{.State}}</td><td>{{.Why}}</td></tr>
{{end}}</table>{{end}}
<h2 id="missing">What is missing</h2>
<ul>
{{range .Missing}}<li>{{.Group}}: {{.Title}}: <span class="note">{{.Reason}}</span></li>
{{else}}<li>Nothing.</li>
{{end}}</ul>
{{range $i, $g := .Groups}}<h2 id="group-{{$i}}">{{$g.Name}}</h2>
{{if $g.Files}}<table>
<tr><th scope="col">File</th><th scope="col">Size</th><th scope="col">Note</th></tr>
{{range $g.Files}}<tr><td><a href="{{.Path}}">{{.Title}}</a></td><td>{{.Size}}</td><td class="note">{{.Note}}</td></tr>
{{end}}</table>{{else}}<p>Nothing was found.</p>{{end}}
{{end}}</body>
</html>
`))
