// Command kubectl-slicecast shows what all servers of a cluster know of its nodes. It is a plugin
// of kubectl, and also works by itself.
package main

import (
	"os"

	"github.com/slicecast/slicecast/internal/plugin"
)

func main() { os.Exit(plugin.Main()) }
