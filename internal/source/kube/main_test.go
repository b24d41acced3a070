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
var productionBackoff, productionListPause, productionConfirmPause = backoff, listPause, confirmPause

func TestMain(m *testing.M) {
	RouteLogs(slog.New(slog.DiscardHandler))
	backoff.Duration, backoff.Cap, absence = 20*time.Millisecond, 200*time.Millisecond, 20*time.Millisecond
	listPause, confirmPause = 200*time.Millisecond, 50*time.Millisecond
	testenv.Main(m, func() error {
		_, err := controlplane.KubernetesBinary(context.Background(), "kube-apiserver")
		return err
	})
}
