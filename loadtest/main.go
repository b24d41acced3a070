// Command slicecast-loadtest measures what Slicecast costs with thousands of nodes, on one machine.
package main

import (
	"context"
	"os"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/loadtest/app"
)

func main() {
	ctx, stop := daemon.SignalContext(context.Background())
	code := app.Execute(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}
