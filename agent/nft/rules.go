package nft

import (
	"encoding/binary"
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

// Hashes returns the hash of each rule's expressions in an IP family. The kernel returns rules in a
// form of its own but keeps user data, which holds the hash. So an equal hash means that the
// kernel's rule is still the same.
func Hashes(rules []Rule, f Family) []uint64 {
	hashes := make([]uint64, len(rules))
	for i, r := range rules {
		_, hashes[i] = r.encode(f.Number)
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

// Types in the user data of rules and elements. nft prints comments and ignores types that it does
// not know.
const (
	userdataComment = 0
	userdataHash    = 0xf0
)

// MaxComment is the length of the longest comment in bytes.
const MaxComment = 250

func appendComment(b []byte, comment string) []byte {
	b = append(b, userdataComment, byte(len(comment)+1))
	return append(append(b, comment...), 0)
}

func appendHash(b []byte, hash uint64) []byte {
	return binary.BigEndian.AppendUint64(append(b, userdataHash, 8), hash)
}

// userdataOf returns the content of the first entry of a type in user data, or nil.
func userdataOf(userdata []byte, kind byte) []byte {
	for len(userdata) >= 2 && len(userdata) >= 2+int(userdata[1]) {
		value := userdata[2 : 2+int(userdata[1])]
		if userdata[0] == kind {
			return value
		}
		userdata = userdata[2+len(value):]
	}
	return nil
}

func commentOf(userdata []byte) string { return netlink.Text(userdataOf(userdata, userdataComment)) }

// hashOf returns the hash in a rule's user data, or 0 if there is none.
func hashOf(userdata []byte) uint64 {
	if v := userdataOf(userdata, userdataHash); len(v) == 8 {
		return binary.BigEndian.Uint64(v)
	}
	return 0
}
