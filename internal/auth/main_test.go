// This file starts the real API server that reviews the tests' tokens.
package auth

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

// cluster is the API server that reviews the tests' tokens.
var cluster *controlplane.ControlPlane

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(controlplane.Around(m, controlplane.Options{}, &cluster))
}
