package nft

import (
	"fmt"
	"slices"

	"github.com/cespare/xxhash/v2"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
)

// Rule is a rule: expressions that the kernel evaluates in order, until one does not match.
type Rule struct {
	Exprs   []expr.Any
	Comment string
}

// Do returns a rule with the expressions of all parts.
func Do(parts ...[]expr.Any) Rule { return Rule{Exprs: slices.Concat(parts...)} }

// Because returns the rule with a comment.
func (r Rule) Because(comment string) Rule {
	r.Comment = comment
	return r
}

// Hash returns the hash of the rule's expressions in an IP family. The kernel returns rules in a
// form of its own but keeps user data, which holds the hash. So an equal hash means that the
// kernel's rule is still the same.
func (r Rule) Hash(f Family) uint64 {
	_, hash := r.encode(f.Number)
	return hash
}

// Hashes returns the hash of each rule.
func Hashes(rules []Rule, f Family) []uint64 {
	hashes := make([]uint64, len(rules))
	for i, r := range rules {
		hashes[i] = r.Hash(f)
	}
	return hashes
}

// encode returns a rule's attributes as the kernel expects them, and the hash of its expressions.
func (r Rule) encode(family byte) (attributes []byte, hash uint64) {
	w := &netlink.Writer{}
	at := w.Nest(unix.NFTA_RULE_EXPRESSIONS)
	for _, e := range r.Exprs {
		b, err := expr.Marshal(family, e)
		if err != nil {
			panic(fmt.Sprintf("encode %T: %v", e, err))
		}
		w.Bytes(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, b)
	}
	w.Close(at)
	hash = xxhash.Sum64(w.Buf)
	var userdata []byte
	if r.Comment != "" {
		userdata = appendComment(userdata, r.Comment)
	}
	w.Bytes(unix.NFTA_RULE_USERDATA, appendHash(userdata, hash))
	return w.Buf, hash
}
