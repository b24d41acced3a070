// This file shortens the source's waits for the tests, and provides a real kube-apiserver.
package kube

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

// The values that TestMain shortens.
var productionBackoff, productionListPause = backoff, listPause

func TestMain(m *testing.M) {
	RouteLogs(slog.New(slog.DiscardHandler))
	backoff.Duration, backoff.Cap, absence = 20*time.Millisecond, 200*time.Millisecond, 20*time.Millisecond
	listPause = 200 * time.Millisecond
	testenv.Main(m, func() error {
		_, err := controlplane.KubernetesBinary(context.Background(), "kube-apiserver")
		return err
	})
}
