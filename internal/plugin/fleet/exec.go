package fleet

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/streaming/pkg/httpstream"
)

// MaxOutput bounds what a command in a Pod may print, in bytes, unless more is expected.
const MaxOutput = 4 << 20

// maxProblems bounds what a command may print to its standard error, in bytes. It ends up in
// messages.
const maxProblems = 64 << 10

// limited is a buffer with a bound. The buffer is no embedded field, whose ReadFrom would pass by
// the bound.
type limited struct {
	limit int // in bytes

	mu     sync.Mutex // guards the buffer
	buffer bytes.Buffer
}

// Write implements io.Writer. Of what is too long, it keeps the beginning.
func (l *limited) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n, _ := l.buffer.Write(p[:min(len(p), l.limit-l.buffer.Len())]) // never fails
	if n < len(p) {
		return n, fmt.Errorf("the command has printed more than %d bytes", l.limit)
	}
	return n, nil
}

// bytes returns what has been written so far. The connection may still write.
func (l *limited) bytes() []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Clone(l.buffer.Bytes())
}

// Run is [Fleet.Exec] with an answer. It returns what the command has printed, also if the command
// fails or ctx ends. More than limit bytes are an error.
func (f *Fleet) Run(ctx context.Context, pod types.NamespacedName, container string, limit int, in io.Reader, command ...string) ([]byte, error) {
	out := limited{limit: limit}
	err := f.Exec(ctx, pod, container, in, &out, command...)
	return out.bytes(), err
}

// Exec runs a command in a container of a Pod, with an input, which may be nil, and copies what the
// command prints to out while it runs, and perhaps for a moment after ctx has ended.
// Unlike asking servers, this needs the right to pods/exec. With it, one can do anything that the
// Pod can do, so it is for administrators.
func (f *Fleet) Exec(ctx context.Context, pod types.NamespacedName, container string, in io.Reader, out io.Writer, command ...string) (err error) {
	target := f.client.CoreV1().RESTClient().Post().Resource("pods").Namespace(pod.Namespace).Name(pod.Name).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{Container: container, Command: command, Stdin: in != nil, Stdout: true, Stderr: true}, scheme.ParameterCodec).URL()
	over, err := remotecommand.NewWebSocketExecutor(f.options.Config, "GET", target.String())
	if err != nil {
		return err
	}
	fallback, err := remotecommand.NewSPDYExecutor(f.options.Config, "POST", target)
	if err != nil {
		return err
	}
	executor, err := remotecommand.NewFallbackExecutor(over, fallback, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	})
	if err != nil {
		return err
	}
	problems := limited{limit: maxProblems}
	began := time.Now()
	defer func() {
		f.options.Logger.Info("Ran a command in a Pod", "pod", pod, "command", strings.Join(command, " "), "took", time.Since(began), "err", err)
	}()
	err = executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: in, Stdout: out, Stderr: &problems})
	switch said := strings.TrimSpace(string(problems.bytes())); {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil && said != "":
		return errors.New(said)
	case err != nil:
		return fmt.Errorf("run %s in the Pod: %w", cmp.Or(command...), err)
	}
	return nil
}
