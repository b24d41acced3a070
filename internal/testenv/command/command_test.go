// This test proves how a command on a host is started, stopped and killed, and that its output and
// exit status are known, with a real shell.
package command

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const soon = time.Minute

func TestLives(t *testing.T) {
	host := testenv.NewNetwork(t).AddNode("a").Host
	c := New(t, host, "sh")
	require.ErrorContains(t, c.Check(), "sh has ended")
	require.NoError(t, c.Stop())

	// The trap makes the shell end successfully. Without it the signal would kill the shell.
	script := `trap 'echo stopped; exit $CODE' TERM; echo begun $CODE; while true; do sleep 0.01; done`
	require.NoError(t, c.Start([]string{"CODE=0"}, "sh", "-c", script))
	c.AwaitLine(t, soon, "begun 0")
	require.ErrorContains(t, c.Start(nil, "true"), "is running already")
	require.NoError(t, c.Check())
	require.Positive(t, c.Pid())
	require.NoError(t, c.Stop())

	require.NoError(t, c.Start([]string{"CODE=3"}, "sh", "-c", script))
	c.AwaitLine(t, soon, "begun 3")
	require.ErrorContains(t, c.Stop(), "exit status 3")
	require.Equal(t, "begun 0\nstopped\nbegun 3\nstopped", c.Tail())

	require.NoError(t, c.Start(nil, "sleep", "1000"))
	require.ErrorContains(t, c.Wait(time.Millisecond), "is still running")
	require.NoError(t, c.Kill())
	require.Error(t, c.Wait(soon))
	require.NoError(t, c.Start(nil, "true"))
	require.NoError(t, c.Wait(soon))
	require.ErrorContains(t, c.Start(nil, "/nowhere/program"), "start sh")
}
