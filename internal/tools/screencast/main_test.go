// These tests prove that the recording in README.md is what the demo prints today, that its picture
// was drawn from it, and how a recording is drawn.
package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const root = "../../.."

// demo is the recording in README.md.
var demo = filepath.Join(root, "docs", "demo")

func checkedIn(t *testing.T) *recording {
	t.Helper()
	content, err := os.ReadFile(demo + ".cast")
	require.NoError(t, err)
	r, err := decode(content)
	require.NoError(t, err)
	again, err := r.encode()
	require.NoError(t, err)
	require.Equal(t, string(content), string(again))
	return r
}

// TestDrawingIsCurrent checks that the picture is that of the recording.
func TestDrawingIsCurrent(t *testing.T) {
	have, err := os.ReadFile(demo + ".svg")
	require.NoError(t, err)
	require.Equal(t, string(checkedIn(t).draw()), string(have), "docs/demo.svg does not match docs/demo.cast: run 'make screencast'")
}

// decode reads a recording that encode has written.
func decode(content []byte) (*recording, error) {
	var h header
	d := json.NewDecoder(bytes.NewReader(content))
	if err := d.Decode(&h); err != nil {
		return nil, err
	}
	r := &recording{Command: h.Command}
	for d.More() {
		var l line
		var code string
		if err := d.Decode(&[]any{&l.At, &code, &l.Text}); err != nil {
			return nil, err
		}
		l.Text = string(bytes.TrimSuffix([]byte(l.Text), []byte("\r\n")))
		r.Lines = append(r.Lines, l)
	}
	return r, nil
}

// varying matches what differs from one run of the demo to the next: how many connections reached
// each pod, and the sizes of messages, which contain a counter.
var varying = regexp.MustCompile(`pod-[a-d] \d+(, |$)|received \d+ bytes`)

// texts returns the lines of a recording without what varies.
func (r *recording) texts() (out []string) {
	for _, l := range r.Lines {
		out = append(out, varying.ReplaceAllStringFunc(l.Text, func(s string) string { return regexp.MustCompile(` \d+`).ReplaceAllString(s, " N") }))
	}
	return out
}

// TestRecordingIsCurrent runs the demo and requires it to print what was recorded.
func TestRecordingIsCurrent(t *testing.T) {
	dir := t.TempDir()
	for name, source := range map[string]string{"slicecast-server": "./server", "slicecast-agent": "./agent", "slicecast-demo": "./internal/demo"} {
		build := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(dir, name), source)
		build.Dir = root
		out, err := build.CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	program := exec.CommandContext(t.Context(), filepath.Join(dir, "slicecast-demo"),
		"--bin="+dir, "--debug-socket="+filepath.Join(dir, "server.sock"), "--status-socket="+filepath.Join(dir, "agent.sock"))
	program.Dir = root
	r, err := record(t.Context(), program)
	require.NoError(t, err)
	require.Equal(t, checkedIn(t).texts(), r.texts(), "the demo does not print what README.md shows: run 'make screencast'")
}

func TestFailedProgram(t *testing.T) {
	_, err := record(t.Context(), exec.CommandContext(t.Context(), "sh", "-c", "echo one; echo what is wrong >&2; exit 3"))
	require.ErrorContains(t, err, "exit status 3")
	require.ErrorContains(t, err, "what is wrong")
	require.ErrorContains(t, run(t.Context(), []string{"name"}), "usage")
}

// TestDrawing checks that texts are escaped, and that lines which are printed together have one
// step of the animation.
func TestDrawing(t *testing.T) {
	r := &recording{Command: "show", Lines: []line{{0.5, "== A <title>"}, {0.5, ""}, {1.5, "  & more"}}}
	svg := string(r.draw())
	require.Contains(t, svg, `<text class="title" y="31" xml:space="preserve">== A &lt;title&gt;</text>`)
	require.Contains(t, svg, `xml:space="preserve">  &amp; more</text>`)
	require.Equal(t, 3, strings.Count(svg, "% { transform"))
	require.Contains(t, svg, "0.00% { transform: translateY(-54px); }\n16.13% { transform: translateY(-18px); }\n48.39% { transform: none; }")
}
