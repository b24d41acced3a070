package nft

import (
	"encoding/binary"

	"github.com/slicecast/slicecast/agent/netlink"
)

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
