// Command slicecast-server watches the Services of a cluster once, and streams their changes to the
// agents on the cluster's nodes.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/server/app"
)

func main() {
	ctx, stop := daemon.SignalContext(context.Background())
	_, err := daemon.Execute(ctx, app.NewCommand())
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "slicecast-server:", err)
		os.Exit(1)
	}
}
