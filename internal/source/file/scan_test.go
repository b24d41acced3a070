// This test proves that a change of a file counts only once it lasts, for looks at a file at chosen
// times.
package file

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestChangesAreBelievedWhenTheyLast looks at one file at chosen times.
func TestChangesAreBelievedWhenTheyLast(t *testing.T) {
	old, half, whole := service("old"), service("ne"), service("new")
	type look struct {
		at   time.Duration
		text string // "-" means that the file is missing
		want string // the Service held then
	}
	for name, looks := range map[string][]look{
		"written in steps":  {{0, "", "old"}, {30 * time.Millisecond, half, "old"}, {70 * time.Millisecond, whole, "old"}, {125 * time.Millisecond, whole, "new"}},
		"missing briefly":   {{0, "-", "old"}, {30 * time.Millisecond, old, "old"}, {90 * time.Millisecond, "-", "old"}, {150 * time.Millisecond, "-", ""}},
		"undone":            {{0, whole, "old"}, {30 * time.Millisecond, old, "old"}, {60 * time.Millisecond, whole, "old"}, {115 * time.Millisecond, whole, "new"}},
		"empty for a while": {{0, "", "old"}, {500 * time.Millisecond, "\n", "old"}, {1400 * time.Millisecond, "", ""}},
		"empty for long":    {{0, "", "old"}, {1100 * time.Millisecond, "", ""}},
		"never at rest": {{0, whole, "old"}, {40 * time.Millisecond, half, "old"}, {80 * time.Millisecond, whole, "old"},
			{460 * time.Millisecond, half, "old"}, {510 * time.Millisecond, whole, "new"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := files{parser: newParser(), known: map[string]*file{}, pending: map[string]*pending{}}
			f.known["x.yaml"] = f.parser.parse("x.yaml", []byte(old), nil)
			start := time.Now()
			for _, l := range looks {
				raw := []byte(l.text)
				if l.text == "-" {
					raw = nil
				}
				wait := f.see("x.yaml", raw, start.Add(l.at))
				held := ""
				if k := f.known["x.yaml"]; k != nil && len(k.objects) > 0 {
					held = k.objects[0].id.name
				}
				require.Equal(t, l.want, held, "at %s", l.at)
				require.Positive(t, wait)
				if len(f.pending) > 0 {
					require.LessOrEqual(t, wait, settleEmpty, "an unsettled file is looked at again")
				}
			}
		})
	}
}
