// This file runs the tests in namespaces of their own, and bounds the number of random histories.
package iptables

import (
	"flag"
	"testing"

	"github.com/slicecast/slicecast/internal/testenv"
)

func TestMain(m *testing.M) {
	// Each run of TestHistories starts hundreds of processes. The flag can still be set to more.
	if err := flag.Set("rapid.checks", "6"); err != nil {
		panic(err)
	}
	testenv.Main(m)
}
