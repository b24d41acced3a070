// This file reads the list of flows in which a programmer cannot do what is best, and requires that
// each names a flow of the cases.
package conformance

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// exceptions are the flows in which a programmer of Slicecast does what kube-proxy does in that
// mode instead of what is best. They also list the sessions that are grouped by GroupIPVS. For
// sessions it is not visible whether an exception is needed, because groups may reach the same
// backend by chance.
type exceptions []*exception

type exception struct {
	// Programmer is the mode that the exception is for.
	Programmer Mode
	// Case is the name of a file without its extension. Step is the name of a step, or empty for
	// the beginning. Flow is the name of a flow or session.
	Case, Step, Flow string
	// Reason says why the kernel's interface leaves no choice.
	Reason string
}

// loadExceptions reads a file of exceptions. Each of them must name a flow of the cases.
func loadExceptions(file string, cases []*Case) (exceptions, error) {
	if file == "" {
		return nil, nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var list exceptions
	if err := decodeStrict(text, &list); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Base(file), err)
	}
	for _, e := range list {
		if err := e.validate(cases); err != nil {
			return nil, fmt.Errorf("%s: %s, step %q, flow %q: %w", filepath.Base(file), e.Case, e.Step, e.Flow, err)
		}
	}
	return list, nil
}

func (e *exception) validate(cases []*Case) error {
	if e.Reason == "" {
		return fmt.Errorf("reason is missing")
	}
	for _, c := range cases {
		if c.ID != e.Case || !c.In(e.Programmer) {
			continue
		}
		for _, step := range c.All(e.Programmer) {
			if step.Name != e.Step {
				continue
			}
			if slices.ContainsFunc(step.Flows, func(f Flow) bool { return f.Name == e.Flow }) ||
				slices.ContainsFunc(step.Sessions, func(s Session) bool { return s.Name == e.Flow && s.GroupIPVS != "" }) {
				return nil
			}
		}
	}
	return fmt.Errorf("no such flow or session for %q", e.Programmer)
}

// find returns the exception for a flow, or nil.
func (list exceptions) find(programmer Mode, id, step, flow string) *exception {
	for _, e := range list {
		if e.Programmer == programmer && e.Case == id && e.Step == step && e.Flow == flow {
			return e
		}
	}
	return nil
}

// loadAll reads the cases and exceptions that the flags name.
func loadAll(t *testing.T) ([]*Case, exceptions) {
	t.Helper()
	cases, err := Load(*scenarioDir)
	require.NoError(t, err)
	list, err := loadExceptions(*exceptionsFile, cases)
	require.NoError(t, err)
	return cases, list
}
