// This file isolates the tests, and builds what they need before.
package upstream

import (
	"testing"

	"github.com/slicecast/slicecast/internal/testenv/cluster"
)

func TestMain(m *testing.M) { cluster.Main(m, Prepare) }
