// These tests prove that a command in a Pod cannot make this process hold any amount of output.
package fleet

import (
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOutputIsBounded(t *testing.T) {
	l := &limited{limit: 10}
	_, err := io.Copy(l, strings.NewReader("0123456789"))
	require.NoError(t, err)
	require.Equal(t, "0123456789", l.buffer.String())
	// io.Copy does not write to a buffer that can read.
	_, err = io.Copy(l, strings.NewReader("more"))
	require.ErrorContains(t, err, "more than 10 bytes")
	require.Equal(t, 10, l.buffer.Len())
}
