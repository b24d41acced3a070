package daemon

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// Execute runs a command. understood tells that its command line was, and that the error, if any, is of what it did; an error about the
// command line ends with where to read on.
func Execute(ctx context.Context, root *cobra.Command) (understood bool, err error) {
	root.PersistentPreRun = func(*cobra.Command, []string) { understood = true }
	c, err := root.ExecuteContextC(ctx)
	if err != nil && !understood {
		// Suggestions come in lines of their own.
		err = fmt.Errorf("%s; see %s --help", strings.Join(strings.Fields(err.Error()), " "), c.CommandPath())
	}
	return understood, err
}
