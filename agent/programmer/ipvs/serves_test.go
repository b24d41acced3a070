// This test proves that Serves reports for which IP families a real kernel has rules of the
// programmer.
package ipvs

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestServes asserts that Serves reports for which IP families there are rules.
func TestServes(t *testing.T) {
	c := newCluster(t, Options{})
	serves := func(want bool) {
		t.Helper()
		for _, family := range families {
			require.NoError(t, c.a.Do(func() error {
				got, err := Serves(family)
				require.Equal(t, want, got)
				return err
			}))
		}
	}
	serves(false)
	require.NoError(t, c.Replace(t.Context(), c.state))
	serves(true)
	require.NoError(t, c.Cleanup(t.Context()))
	serves(false)
}
