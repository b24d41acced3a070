package nft

import (
	"fmt"
	"slices"
)

// Should returns what there should be in the table, for a comparison: the text, and which table.
func (t Table) Should(format string, args ...any) string {
	return fmt.Sprintf(format, args...) + fmt.Sprintf(" in the %v table %s", t.IP, t.Name)
}

// Differences returns what chains the table should have instead of the held ones, by the rules of
// the wanted ones.
func (t Table) Differences(held map[string]*HeldChain, wanted map[string][]Rule) (different []string) {
	for name, rules := range wanted {
		switch is := held[name]; {
		case is == nil:
			different = append(different, t.Should("a chain %s", name))
		case slices.Contains(is.Rules, 0):
			position := slices.Index(is.Rules, 0) + 1
			different = append(different, t.Should("other rules in chain %s", name)+fmt.Sprintf(", whose rule %d another program has written", position))
		case !slices.Equal(is.Rules, Hashes(rules, t.Family)):
			different = append(different, t.Should("other rules in chain %s", name))
		}
	}
	for name := range held {
		if _, ok := wanted[name]; !ok {
			different = append(different, t.Should("no chain %s", name))
		}
	}
	return different
}
