package scenario

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/slicecast/slicecast/loadtest/generate"
)

// Groups is the value of a parameter that says how many Services there are and how many endpoints
// each has: COUNTxENDPOINTS or COUNTxLEAST-MOST, separated by commas.
type Groups []generate.Group

// String implements pflag.Value.
func (g *Groups) String() string {
	var out []string
	for _, group := range *g {
		if group.Least == group.Most {
			out = append(out, fmt.Sprintf("%dx%d", group.Count, group.Least))
		} else {
			out = append(out, fmt.Sprintf("%dx%d-%d", group.Count, group.Least, group.Most))
		}
	}
	return strings.Join(out, ",")
}

// Set implements pflag.Value. An empty value means no groups. Whether a cluster can have these
// numbers is checked by generate.Config.Validate.
func (g *Groups) Set(v string) error {
	if v == "" {
		*g = nil
		return nil
	}
	var out Groups
	for part := range strings.SplitSeq(v, ",") {
		count, sizes, ok := strings.Cut(part, "x")
		least, most, ranged := strings.Cut(sizes, "-")
		if !ranged {
			most = least
		}
		var n [3]int
		for i, s := range []string{count, least, most} {
			number, err := strconv.ParseUint(strings.TrimSpace(s), 10, 31)
			if !ok || err != nil {
				return fmt.Errorf("%q is not a group: use COUNTxENDPOINTS or COUNTxLEAST-MOST, such as 1000x50,1x5000", part)
			}
			n[i] = int(number)
		}
		out = append(out, generate.Group{Count: n[0], Least: n[1], Most: n[2]})
	}
	*g = out
	return nil
}

// Type implements pflag.Value.
func (*Groups) Type() string { return "groups" }
