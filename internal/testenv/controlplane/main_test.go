// This file starts the control plane that most tests of the package share.
package controlplane

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

// shared is the control plane for all tests that do not need one of their own.
var shared *ControlPlane

func TestMain(m *testing.M) {
	if os.Getenv(orphanMaker) != "" {
		makeOrphans()
	}
	goleak.VerifyTestMain(Around(m, Options{
		Controllers:     true,
		ControllerFlags: []string{"--max-endpoints-per-slice=5"},
	}, &shared))
}
