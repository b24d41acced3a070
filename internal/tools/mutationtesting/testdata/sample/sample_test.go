// These tests leave some mutants of sample.go alive, which TestTry names.
package sample

import "testing"

func TestSample(t *testing.T) {
	var a adder
	if doubled != 28 || !a.add(1) || !a.add(1) || a.add(10) || a.sum != 2 || flags(false, false) {
		t.Fatal(doubled, a)
	}
	for _, c := range []struct {
		in   string
		bits uint8
		want string
		n    uint64
	}{{"a", 3, "a!", 8}, {"c", 3, "c", 0}, {"b", 3, "", 7}, {"b", 1, "", 5}, {"", 0, "", 4}} {
		if got, n := word(c.in, c.bits); got != c.want || n != c.n {
			t.Fatal(c, got, n)
		}
	}
}
