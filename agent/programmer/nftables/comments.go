package nftables

import (
	"fmt"
	"strings"

	"github.com/cespare/xxhash/v2"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/view"
)

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
const maxLabel = nft.MaxComment - 20

// frontendComment returns the comment that names a frontend's Service port and kind. nameOf returns
// the label in it.
func frontendComment(label string, kind view.FrontendKind) string { return label + " " + kind.String() }

func nameOf(comment string) string {
	name, _, _ := strings.Cut(comment, " ")
	return name
}
