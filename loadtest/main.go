// Command slicecast-loadtest measures on one machine what Slicecast costs with thousands of nodes.
package main

import (
	"os"

	"github.com/slicecast/slicecast/loadtest/app"
)

func main() {
	ctx, stop := app.SignalContext()
	code := app.Execute(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}
