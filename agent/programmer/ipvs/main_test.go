// This file runs the tests in the virtual machine, and bounds the number of random histories.
package ipvs

import (
	"flag"
	"testing"

	"github.com/slicecast/slicecast/internal/testenv/vm"
)

func TestMain(m *testing.M) {
	// The flag can still be set to more.
	if err := flag.Set("rapid.checks", "10"); err != nil {
		panic(err)
	}
	vm.Main(m)
}
