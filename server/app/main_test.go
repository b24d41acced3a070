// This file fails the package's tests if they leave a goroutine behind.
package app

import (
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
