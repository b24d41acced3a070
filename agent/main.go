// Command slicecast-agent programs a node's kernel so that Services are reached. It follows a
// slicecast-server or, standalone, a Kubernetes API server or a directory of manifests.
package main

import (
	"os"

	"github.com/slicecast/slicecast/agent/app"
	"github.com/slicecast/slicecast/internal/daemon"
)

func main() {
	app.UseOneCPU()
	os.Exit(daemon.Main(app.NewCommand()))
}
