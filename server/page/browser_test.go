// This file drives a headless Chromium by the DevTools protocol, over a pipe: no port is opened,
// and no library with types for the whole protocol is needed.
package page

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// browser is a Chromium with one page.
type browser struct {
	t       *testing.T
	session string
	in      *os.File

	mu sync.Mutex // guards the fields below
	// number is that of the latest command, and answers are where those that are not answered yet
	// wait.
	number  int
	answers map[int]chan message
	// problems are what the page logged, threw, or was not allowed to do.
	problems []string
	ended    bool
}

// message is an answer or an event.
type message struct {
	ID     int
	Method string
	Params json.RawMessage
	Result json.RawMessage
	Error  *struct{ Message string }
}

// object is a JSON object.
type object map[string]any

// startBrowser starts a browser, which ends with the test.
func startBrowser(t *testing.T) *browser {
	t.Helper()
	path, err := exec.LookPath("chromium-headless-shell")
	require.NoError(t, err, "the test needs Debian's package chromium-headless-shell: run internal/tools/setup.sh")
	toBrowser, in, err := os.Pipe()
	require.NoError(t, err)
	out, fromBrowser, err := os.Pipe()
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	// Root needs --no-sandbox. The browser only opens what the test serves.
	command := exec.CommandContext(ctx, path, "--remote-debugging-pipe", "--no-sandbox", "--user-data-dir="+t.TempDir(),
		"--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--no-proxy-server", "--window-size=1280,900", "about:blank")
	var errs bytes.Buffer
	command.ExtraFiles, command.Stderr = []*os.File{toBrowser, fromBrowser}, &errs
	require.NoError(t, command.Start())
	toBrowser.Close()
	fromBrowser.Close()
	b := &browser{t: t, in: in, answers: make(map[int]chan message)}
	read := make(chan struct{})
	go func() {
		defer close(read)
		b.read(out)
	}()
	t.Cleanup(func() {
		// It removes its files before it ends.
		_, _ = fmt.Fprintf(in, `{"id":0,"method":"Browser.close"}`+"\x00")
		kill := time.AfterFunc(patience, cancel)
		err := command.Wait()
		kill.Stop()
		cancel()
		require.NoError(t, err, "%s", errs.String())
		in.Close()
		<-read
		out.Close()
	})
	var target struct{ TargetID string }
	b.call("Target.createTarget", object{"url": "about:blank"}, &target)
	var attached struct{ SessionID string }
	b.call("Target.attachToTarget", object{"targetId": target.TargetID, "flatten": true}, &attached)
	b.session = attached.SessionID
	for _, domain := range []string{"Page", "Runtime", "Log", "Network", "Accessibility", "Audits"} {
		b.call(domain+".enable", nil, nil)
	}
	b.call("Emulation.setFocusEmulationEnabled", object{"enabled": true}, nil)
	return b
}

// read receives messages until the browser ends.
func (b *browser) read(from *os.File) {
	messages := bufio.NewReader(from)
	for {
		text, err := messages.ReadBytes(0)
		b.mu.Lock()
		if err != nil {
			b.ended = true
			for _, waiting := range b.answers {
				close(waiting)
			}
			b.mu.Unlock()
			return
		}
		var m message
		if err := json.Unmarshal(bytes.TrimSuffix(text, []byte{0}), &m); err != nil {
			b.problems = append(b.problems, err.Error())
		}
		switch m.Method {
		case "":
			if waiting := b.answers[m.ID]; waiting != nil {
				waiting <- m
				delete(b.answers, m.ID)
			}
		case "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Audits.issueAdded", "Page.javascriptDialogOpening":
			b.problems = append(b.problems, m.Method+": "+string(m.Params))
		}
		b.mu.Unlock()
	}
}

// call calls a method, and decodes its result unless result is nil.
func (b *browser) call(method string, params object, result any) {
	b.t.Helper()
	waiting := make(chan message, 1)
	b.mu.Lock()
	require.False(b.t, b.ended, "the browser has ended")
	b.number++
	number := b.number
	b.answers[number] = waiting
	b.mu.Unlock()
	command := object{"id": number, "method": method}
	if params != nil {
		command["params"] = params
	}
	if b.session != "" {
		command["sessionId"] = b.session
	}
	text, err := json.Marshal(command)
	require.NoError(b.t, err)
	_, err = b.in.Write(append(text, 0))
	require.NoError(b.t, err)
	select {
	case m, ok := <-waiting:
		require.True(b.t, ok, "the browser has ended")
		require.Nil(b.t, m.Error, "%s: %+v", method, m.Error)
		if result != nil {
			require.NoError(b.t, json.Unmarshal(m.Result, result))
		}
	case <-time.After(2 * patience): // until waits for patience in the browser
		require.Fail(b.t, "no answer", method)
	}
}

// open opens a page in a light or dark scheme.
func (b *browser) open(url, scheme string) {
	b.t.Helper()
	b.call("Emulation.setEmulatedMedia", object{"features": []object{
		{"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": "reduce"},
	}}, nil)
	b.call("Page.navigate", object{"url": url}, nil)
}

// eval returns the value of an expression of JavaScript, which it awaits.
func (b *browser) eval(expression string) any {
	b.t.Helper()
	var out struct {
		Result           struct{ Value any }
		ExceptionDetails json.RawMessage
	}
	b.call("Runtime.evaluate", object{"expression": expression, "returnByValue": true, "awaitPromise": true}, &out)
	require.Empty(b.t, out.ExceptionDetails, expression)
	return out.Result.Value
}

// decode decodes the value of an expression of JavaScript.
func (b *browser) decode(expression string, to any) {
	b.t.Helper()
	text, err := json.Marshal(b.eval(expression))
	require.NoError(b.t, err)
	require.NoError(b.t, json.Unmarshal(text, to))
}

// until waits until an expression is true.
func (b *browser) until(expression string) {
	b.t.Helper()
	holds := b.eval(fmt.Sprintf(`new Promise((done) => {
		const end = performance.now() + %d;
		const look = () => (%s) ? done(true) : performance.now() > end ? done(false) : setTimeout(look, 10);
		look();
	})`, patience.Milliseconds(), expression))
	if holds != true {
		shown := b.eval("document.body?.innerText")
		b.mu.Lock()
		defer b.mu.Unlock()
		require.FailNow(b.t, "it does not come to hold", "%s\n%v\n%v", expression, shown, b.problems)
	}
}

// text returns the text of an element.
func (b *browser) text(id string) string {
	b.t.Helper()
	return b.eval(fmt.Sprintf("document.getElementById(%q).textContent", id)).(string)
}

// keys are the codes of keys that have no character.
var keys = map[string]int{"Tab": 9, "Enter": 13, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}

// press presses keys.
func (b *browser) press(names ...string) {
	b.t.Helper()
	for _, name := range names {
		down := object{"type": "rawKeyDown", "key": name, "code": name, "windowsVirtualKeyCode": keys[name]}
		if name == "Enter" {
			down["type"], down["text"] = "keyDown", "\r"
		}
		b.call("Input.dispatchKeyEvent", down, nil)
		b.call("Input.dispatchKeyEvent", object{"type": "keyUp", "key": name, "code": name, "windowsVirtualKeyCode": keys[name]}, nil)
	}
}

// write types a text.
func (b *browser) write(text string) {
	b.t.Helper()
	b.call("Input.insertText", object{"text": text}, nil)
}

// focused returns the id or else the text of the element with the focus.
func (b *browser) focused() string {
	b.t.Helper()
	return b.eval("document.activeElement.id || document.activeElement.textContent").(string)
}

// accessible returns the accessibility tree: a line for each node that has a name, with its role.
// Plain text is left out.
func (b *browser) accessible() string {
	b.t.Helper()
	var tree struct {
		Nodes []struct {
			Ignored    bool
			Role, Name struct{ Value any }
		}
	}
	b.call("Accessibility.getFullAXTree", nil, &tree)
	var out strings.Builder
	for _, n := range tree.Nodes {
		if name, _ := n.Name.Value.(string); !n.Ignored && name != "" && n.Role.Value != "StaticText" && n.Role.Value != "InlineTextBox" {
			fmt.Fprintf(&out, "%v: %s\n", n.Role.Value, name)
		}
	}
	return out.String()
}

// screenshot writes a picture of the page to a file.
func (b *browser) screenshot(path string, height int) {
	b.t.Helper()
	b.call("Emulation.setDeviceMetricsOverride", object{"width": 1280, "height": height, "deviceScaleFactor": 1, "mobile": false}, nil)
	b.eval("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
	var shot struct{ Data string }
	b.call("Page.captureScreenshot", object{"format": "png"}, &shot)
	content, err := base64.StdEncoding.DecodeString(shot.Data)
	require.NoError(b.t, err)
	require.NoError(b.t, os.WriteFile(path, content, 0o644))
}

// requireNoProblems requires that the page has logged, thrown and violated nothing. Questions about
// what does not exist are logged by the browser.
func (b *browser) requireNoProblems() {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	require.Empty(b.t, slices.DeleteFunc(b.problems, func(p string) bool { return strings.Contains(p, "status of 404 ") }))
}
