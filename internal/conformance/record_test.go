// This file records how kube-proxy does with the cases of known bugs, when it is held to what
// Slicecast is held to.
package conformance

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/conformance/bugs"
)

// recorder collects the outcomes of checks.
type recorder struct {
	outcomes []bugs.Outcome
}

func (r *recorder) add(t *testing.T, c *Case, step *Step, what string, err error) {
	t.Helper()
	digest, failed := bugs.Digest(filepath.Join(*scenarioDir, c.ID+".yaml"))
	require.NoError(t, failed)
	if step.Name != "" && what != bugs.Stopped {
		what = fmt.Sprintf("step %q: %s", step.Name, what)
	}
	if err != nil {
		t.Logf("%s: %v", what, err)
	}
	r.outcomes = append(r.outcomes, bugs.Outcome{Case: c.ID, Digest: digest, Check: what, Passed: err == nil})
}

// reference reports whether the subject is held to what kube-proxy does in its mode, rather than to
// what is best.
func (s *stage) reference() bool { return s.subject.Reference() && s.recorder == nil }
