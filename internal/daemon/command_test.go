// This test proves that an error in the command line points to the help, and that any other error
// does not.
package daemon

import (
	"errors"
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"
)

func TestUsageErrorsPointToTheHelp(t *testing.T) {
	failure := errors.New("it failed")
	for _, c := range []struct {
		args       []string
		understood bool
		err        string
	}{
		{[]string{"show"}, true, "it failed"},
		{[]string{"shwo"}, false, `unknown command "shwo" for "tool" Did you mean this? show; see tool --help`},
		{[]string{"show", "--a"}, false, "unknown flag: --a; see tool show --help"},
		{[]string{"show", "a"}, false, `unknown command "a" for "tool show"; see tool show --help`},
	} {
		root := &cobra.Command{Use: "tool", SilenceErrors: true, SilenceUsage: true}
		root.AddCommand(&cobra.Command{Use: "show", Args: cobra.NoArgs, RunE: func(*cobra.Command, []string) error { return failure }})
		root.SetArgs(c.args)
		understood, err := Execute(t.Context(), root)
		require.EqualError(t, err, c.err)
		require.Equal(t, c.understood, understood)
		require.Equal(t, c.understood, errors.Is(err, failure))
	}
}
