package target

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/tlsfiles"
	"github.com/slicecast/slicecast/loadtest/generate"
	serverapp "github.com/slicecast/slicecast/server/app"
)

// gracePeriod is for streams that are still there when the process ends: their nodes have ended too, or are about to.
const gracePeriod = 5 * time.Second

// Serve is the server's process: it does what it reads from in, until that or the context ends.
func Serve(ctx context.Context, in io.Reader, out io.Writer, logger *slog.Logger) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	requests, answers := json.NewDecoder(in), json.NewEncoder(out)
	var first request
	if err := requests.Decode(&first); err != nil {
		return fmt.Errorf("control input: %w", err)
	}
	if first.Setup == nil {
		return errors.New("control input: the first line must hold setup")
	}
	server, source, err := newServer(first.Setup, logger)
	if err != nil {
		return errors.Join(err, answers.Encode(answer{Error: err.Error()}))
	}
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx) }()
	if err := answers.Encode(answer{Address: server.Addresses().GRPC.String()}); err != nil {
		cancel()
		return errors.Join(err, <-ended)
	}
	input := make(chan error, 1)
	go func() { input <- obey(ctx, requests, answers, source) }()
	select {
	case err := <-ended:
		return err
	case err := <-input:
		cancel()
		return errors.Join(err, <-ended)
	}
}

// newServer makes the server as slicecast-server does without flags, but for where its state comes from and where it
// listens.
func newServer(s *Setup, logger *slog.Logger) (*serverapp.Server, *generate.Source, error) {
	var files tlsfiles.Files
	for path, content := range map[*string][]byte{
		&files.Certificate: s.Certificate, &files.PrivateKey: s.PrivateKey, &files.CA: s.ClientCA,
	} {
		var err error
		if *path, err = memoryFile(content); err != nil {
			return nil, nil, fmt.Errorf("TLS files: %w", err)
		}
	}
	cluster, err := generate.New(s.Cluster)
	if err != nil {
		return nil, nil, err
	}
	source := generate.NewSource(cluster)
	server, err := serverapp.New(serverapp.Config{
		Source: source, TLS: &files, BindAddress: "127.0.0.1:0", GracePeriod: gracePeriod,
		Logger: logger, Registry: daemon.NewRegistry(),
	})
	return server, source, err
}

// memoryFile makes a file that no other process sees and that is gone with this one, however it ends.
func memoryFile(content []byte) (path string, err error) {
	fd, err := unix.MemfdCreate("slicecast-loadtest", unix.MFD_CLOEXEC)
	if err != nil {
		return "", err
	}
	path = fmt.Sprintf("/proc/self/fd/%d", fd)
	return path, os.WriteFile(path, content, 0)
}

// obey does what further requests say, until there are none.
func obey(ctx context.Context, requests *json.Decoder, answers *json.Encoder, source *generate.Source) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// The input's end is noticed during a churn too. Reading can't be interrupted, so this goroutine may outlive the call;
	// the process then ends.
	read := make(chan request)
	var readErr error // readable when read is closed
	go func() {
		defer cancel()
		defer close(read)
		for {
			var r request
			if readErr = requests.Decode(&r); readErr != nil {
				return
			}
			select {
			case read <- r:
			case <-ctx.Done():
				return
			}
		}
	}()
	for r := range read {
		if r.Churn == nil {
			return errors.New("control input: a line that holds nothing to do")
		}
		lag, err := source.Churn(ctx, *r.Churn)
		if err != nil {
			return nil // the context has ended, and with it everything
		}
		if err := answers.Encode(answer{Lag: &lag}); err != nil {
			return fmt.Errorf("control output: %w", err)
		}
	}
	if readErr == nil || errors.Is(readErr, io.EOF) {
		return nil
	}
	return fmt.Errorf("control input: %w", readErr)
}
