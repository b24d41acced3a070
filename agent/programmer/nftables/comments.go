package nftables

import (
	"fmt"
	"strings"

	"github.com/cespare/xxhash/v2"

	"github.com/slicecast/slicecast/agent/view"
)

// Types in the user data of rules and elements. nft prints comments and ignores types that it does
// not know.
const (
	userdataComment = 0
	userdataHash    = 0xf0
)

// maxComment is the longest comment in bytes.
const maxComment = 250

func appendComment(b []byte, comment string) []byte {
	b = append(b, userdataComment, byte(len(comment)+1))
	return append(append(b, comment...), 0)
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

func commentOf(userdata []byte) string { return textOf(userdataOf(userdata, userdataComment)) }

// label returns a Service port's name for comments. Replace identifies the Service port by it. If
// the name is too long for a comment, its end is replaced by a hash.
func label(id view.ServicePortID) string {
	name := id.String()
	if len(name) > maxLabel {
		name = fmt.Sprintf("%s~%016x", name[:maxLabel-17], xxhash.Sum64String(name))
	}
	return name
}

// maxLabel is the longest label in bytes. It leaves room for the kind of a frontend.
const maxLabel = maxComment - 20

// frontendComment returns the comment that names a frontend's Service port and kind. nameOf returns
// the label in it.
func frontendComment(label string, kind view.FrontendKind) string { return label + " " + kind.String() }

func nameOf(comment string) string {
	name, _, _ := strings.Cut(comment, " ")
	return name
}
