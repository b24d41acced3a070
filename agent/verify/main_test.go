// This file runs the tests in namespaces of their own.
package verify

import (
	"testing"

	"github.com/slicecast/slicecast/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }
