package daemon

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
)

// Execute runs a command. understood reports whether its command line was valid, so that an error
// is one of the command's work. An error in the command line ends with a pointer to the command's
// help.
func Execute(ctx context.Context, root *cobra.Command) (understood bool, err error) {
	root.PersistentPreRun = func(*cobra.Command, []string) { understood = true }
	c, err := root.ExecuteContextC(ctx)
	if err != nil && !understood {
		// cobra puts suggestions on lines of their own; the error has one line.
		err = fmt.Errorf("%s; see %s --help", strings.Join(strings.Fields(err.Error()), " "), c.CommandPath())
	}
	return understood, err
}

// Main runs a command until it ends or the first SIGINT or SIGTERM ends its context. It prints the
// command's error, and returns the exit code of the process.
func Main(root *cobra.Command) int {
	ctx, stop := SignalContext(context.Background())
	defer stop()
	if _, err := Execute(ctx, root); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", root.Name(), err)
		return 1
	}
	return 0
}
