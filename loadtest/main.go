// Command slicecast-loadtest measures what Slicecast costs with thousands of nodes, on one machine.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/loadtest/app"
)

func main() {
	ctx, stop := daemon.SignalContext(context.Background())
	err := app.NewCommand().ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "slicecast-loadtest:", err)
		os.Exit(1)
	}
}
