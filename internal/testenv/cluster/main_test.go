// This file isolates the tests. It also makes the test binary a program with a cluster, for the
// test that kills it.
package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// victimVariable makes the test binary a program that starts a cluster, prints the name of its
// folder, says so and waits.
const victimVariable = "SLICECAST_CLUSTER_VICTIM"

const victimSays = "the cluster is up"

func TestMain(m *testing.M) {
	if os.Getenv(victimVariable) == "" {
		Main(m)
	}
	Isolate()
	c, err := Start(context.Background(), Options{})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(filepath.Base(c.Dir) + "\n" + victimSays)
	select {}
}
