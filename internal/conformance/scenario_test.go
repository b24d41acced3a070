package conformance

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestLoad(t *testing.T) {
	cases, err := Load("testdata/scenarios")
	require.NoError(t, err)
	require.Len(t, cases, 42)
}
