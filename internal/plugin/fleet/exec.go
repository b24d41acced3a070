package fleet

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/streaming/pkg/httpstream"
)

// maxOutput bounds what a command in a Pod may print, in bytes.
const maxOutput = 4 << 20

// errOutput means that a command has printed more than maxOutput.
var errOutput = fmt.Errorf("the command has printed more than %d bytes", maxOutput)

// limited is a buffer with a bound.
type limited struct{ bytes.Buffer }

// Write implements io.Writer.
func (l *limited) Write(p []byte) (int, error) {
	if l.Len()+len(p) > maxOutput {
		return 0, errOutput
	}
	return l.Buffer.Write(p)
}

// Run runs a command in the first container of an agent's Pod, and returns what it prints. Unlike
// asking servers, this needs the right to pods/exec. With it, one can do anything that the agent
// can do, so it is for administrators.
func (f *Fleet) Run(ctx context.Context, a *Agent, command ...string) ([]byte, error) {
	target := f.client.CoreV1().RESTClient().Post().Resource("pods").Namespace(a.Namespace).Name(a.Name).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{Command: command, Stdout: true, Stderr: true}, scheme.ParameterCodec).URL()
	over, err := remotecommand.NewWebSocketExecutor(f.options.Config, "GET", target.String())
	if err != nil {
		return nil, err
	}
	fallback, err := remotecommand.NewSPDYExecutor(f.options.Config, "POST", target)
	if err != nil {
		return nil, err
	}
	executor, err := remotecommand.NewFallbackExecutor(over, fallback, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	})
	if err != nil {
		return nil, err
	}
	var out, problems limited
	err = executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: &out, Stderr: &problems})
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err != nil && problems.Len() > 0:
		return nil, errors.New(strings.TrimSpace(problems.String()))
	case err != nil:
		return nil, fmt.Errorf("run %s in the Pod: %w", cmp.Or(command...), err)
	}
	return out.Bytes(), nil
}
