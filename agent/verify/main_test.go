// This file runs the tests in namespaces of their own, and bounds the number of random states.
package verify

import (
	"flag"
	"testing"

	"github.com/slicecast/slicecast/internal/testenv"
)

func TestMain(m *testing.M) {
	// Each run of TestRandomServices takes a tenth of a second. The flag can still be set to more.
	if err := flag.Set("rapid.checks", "25"); err != nil {
		panic(err)
	}
	testenv.Main(m)
}
