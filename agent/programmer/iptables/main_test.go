package iptables

import (
	"flag"
	"testing"

	"github.com/slicecast/slicecast/internal/testenv"
)

func TestMain(m *testing.M) {
	// Each of TestHistories' runs hundreds of processes. The flag can still be given for more.
	if err := flag.Set("rapid.checks", "6"); err != nil {
		panic(err)
	}
	testenv.Main(m)
}
