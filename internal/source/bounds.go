package source

import (
	"net/netip"

	"github.com/slicecast/slicecast/internal/model"
)

// Lists are bounded as model.Service.Check and those beside it say. What is beyond that is left out, and reported as TooMany.

// maxDetail bounds what is said of a value that anybody may have written, in bytes.
const maxDetail = 512

// first returns a list up to a bound, and reports what it leaves out.
func first[T any](list []T, most int, field string, skips *skipList) []T {
	if len(list) <= most {
		return list
	}
	skips.add(TooMany, field, "has %d entries, and the first %d are used", len(list), most)
	return list[:most]
}

// unique keeps the entries of a list of addresses or ranges, each once, and of each family no more than nodes use.
type unique[T comparable] struct {
	field    string
	skips    *skipList
	seen     map[T]struct{}
	families [2]int // entries of IPv4, and of IPv6
}

// add reports whether an entry, which has or begins with an address, is to be kept.
func (u *unique[T]) add(entry T, address netip.Addr) bool {
	if _, ok := u.seen[entry]; ok {
		return false
	}
	n := &u.families[0]
	if model.FamilyOf(address) == model.IPv6 {
		n = &u.families[1]
	}
	if *n == model.MaxFrontends {
		u.skips.add(TooMany, u.field, "has more than %d entries of a family, and the first ones are used", model.MaxFrontends)
		return false
	}
	*n++
	if u.seen == nil {
		u.seen = make(map[T]struct{})
	}
	u.seen[entry] = struct{}{}
	return true
}
