package source

import (
	"net/netip"

	"github.com/slicecast/slicecast/internal/model"
)

// The bounds on lists are those of model.Service.Check and of the other objects' Check. Entries
// beyond a bound are left out and reported as TooMany.

// maxDetail bounds the text about a value that anyone may have written, in bytes.
const maxDetail = 512

// first returns the list up to a bound, and reports what it leaves out.
func first[T any](list []T, most int, field string, skips *SkipList) []T {
	if len(list) <= most {
		return list
	}
	skips.Add(TooMany, field, "has %d entries, and the first %d are used", len(list), most)
	return list[:most]
}

// unique selects the entries of a list of addresses or ranges: each once, and no more of a family
// than nodes use.
type unique[T comparable] struct {
	field    string
	skips    *SkipList
	seen     map[T]struct{}
	families [2]int // entries of IPv4 and of IPv6
}

// add reports whether to keep an entry. address is the entry's address, or its first one.
func (u *unique[T]) add(entry T, address netip.Addr) bool {
	if _, ok := u.seen[entry]; ok {
		return false
	}
	n := &u.families[0]
	if model.FamilyOf(address) == model.IPv6 {
		n = &u.families[1]
	}
	if *n == model.MaxFrontends {
		u.skips.Add(TooMany, u.field, "has more than %d entries of a family, and the first ones are used", model.MaxFrontends)
		return false
	}
	*n++
	if u.seen == nil {
		u.seen = make(map[T]struct{})
	}
	u.seen[entry] = struct{}{}
	return true
}
