// This file lets the tests outside the package see all problems, however old they are.
package view

import "strings"

// Problems returns the Services with problems as of the last Update, each once and in no particular
// order.
func (v *View) Problems() []Problem {
	out := []Problem{}
	for key, s := range v.services {
		if len(s.problems) > 0 {
			out = append(out, Problem{key, strings.Join(s.problems, "; ")})
		}
	}
	return out
}
