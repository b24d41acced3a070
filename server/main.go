// Command slicecast-server watches the Services of a cluster once, and streams their changes to the
// agents on the cluster's nodes.
package main

import (
	"os"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/server/app"
)

func main() { os.Exit(daemon.Main(app.NewCommand())) }
