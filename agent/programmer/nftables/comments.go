package nftables

import (
	"fmt"
	"strings"

	"github.com/cespare/xxhash/v2"

	"github.com/slicecast/slicecast/agent/view"
)

// Types in the user data of rules and of elements: nft shows comments, and leaves out what it does not know.
const (
	userdataComment = 0
	userdataHash    = 0xf0
)

// maxComment is as long as a comment can be.
const maxComment = 250

func appendComment(b []byte, comment string) []byte {
	b = append(b, userdataComment, byte(len(comment)+1))
	return append(append(b, comment...), 0)
}

// userdataOf gives what user data hold of a type.
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

// label gives a Service port's name for comments, as it is found again by it. What is too long for that ends in a hash.
func label(id view.ServicePortID) string {
	name := id.String()
	if len(name) > maxLabel {
		name = fmt.Sprintf("%s~%016x", name[:maxLabel-17], xxhash.Sum64String(name))
	}
	return name
}

// maxLabel leaves room for the kind of a frontend.
const maxLabel = maxComment - 20

// frontendComment tells whose a frontend is; nameOf gives the label in it.
func frontendComment(label string, kind view.FrontendKind) string { return label + " " + kind.String() }

func nameOf(comment string) string {
	name, _, _ := strings.Cut(comment, " ")
	return name
}
