// TestLines proves that neither one tenant nor many together fill a log, and that no tenant keeps
// others out of it.
package bounded

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		log, l := slog.New(slog.NewTextHandler(&out, nil)), NewLines()
		line := func(namespace string) {
			if to := l.Logger(log, namespace); to != nil {
				to.Info("line", "of", namespace)
			}
		}
		lines := func(of string) int { return strings.Count(out.String(), "of="+of) }
		const many = 3 * LinesAtOnce
		for range many {
			line("one")
		}
		require.Equal(t, LinesOfNamespaceAtOnce, lines("one"))
		line("other")
		require.Contains(t, out.String(), fmt.Sprint("not_logged=", many-LinesOfNamespaceAtOnce, " of=other"))
		<-time.After(LinesOfNamespaceEvery)
		line("one")
		line("one")
		require.Equal(t, LinesOfNamespaceAtOnce+1, lines("one"))

		out.Reset()
		for i := range many {
			line(fmt.Sprint("tenant-", i))
		}
		require.LessOrEqual(t, lines("tenant-"), LinesAtOnce)
		for i := range 2 * maxNamespaces {
			line(fmt.Sprint("tenant-", i))
		}
		require.Equal(t, maxNamespaces, l.of.Len())
	})
}
