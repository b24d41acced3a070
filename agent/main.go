// Command slicecast-agent programs a node's kernel with where Services lead. It follows a
// slicecast-server or, standalone, a Kubernetes API server or a directory of manifests.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/slicecast/slicecast/agent/app"
	"github.com/slicecast/slicecast/internal/daemon"
)

func main() {
	app.UseOneCPU()
	ctx, stop := daemon.SignalContext(context.Background())
	_, err := daemon.Execute(ctx, app.NewCommand())
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "slicecast-agent:", err)
		os.Exit(1)
	}
}
