// Package sample has code of each kind that a mutant changes, and code that none changes.
package sample

import "strings"

const limit = 3 + 4 // no mutant

var doubled = limit * len(strings.Repeat("x", half(8)))

func half(n int) int { return n / 2 }

type adder struct{ sum, calls int }

// add is tested with 1 and 10, so nobody notices where exactly the limit is. Nobody looks at calls.
func (a *adder) add(n int) bool {
	if n > limit {
		return false
	}
	a.sum += n
	a.calls++
	return true
}

// flags is tested for false, false only.
func flags(a, b bool) bool {
	return a || // a line break after an operator
		b
}

func word(s string, bits uint8) (string, uint64) {
	switch {
	case strings.HasPrefix(s, "a"):
		return s + "!", 1 << bits
	case s != "" && !strings.Contains(s, "b"):
		return s, 0
	}
	return "", uint64(bits&3) | 4
}
