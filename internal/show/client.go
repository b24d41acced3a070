package show

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Plural returns a number with a noun, such as "1 node" and "2 nodes".
func Plural[N ~int | ~uint32](word string, n N) string {
	if n != 1 {
		word += "s"
	}
	return fmt.Sprint(n, " ", word)
}

// EnumName returns the name of an enum's value without its prefix.
func EnumName(e fmt.Stringer, prefix string) string { return strings.TrimPrefix(e.String(), prefix) }

// KindName returns the name of a kind of clients.
func KindName(k pb.ClientKind) string { return strings.ToLower(EnumName(k, "CLIENT_KIND_")) }

// Kind says what a client is and, if it is a relay, of how many nodes.
func Kind(a *pb.AgentStatus) string {
	if a.GetKind() == pb.ClientKind_CLIENT_KIND_RELAY {
		return fmt.Sprintf("relay of %d", a.GetNodes())
	}
	return KindName(a.GetKind())
}

// State says how far a client is.
func State(a *pb.AgentStatus) string {
	switch {
	case !a.GetSynced():
		return "syncing" // the initial state is being sent
	case a.GetKind() == pb.ClientKind_CLIENT_KIND_OBSERVER:
		return "synced"
	case !a.GetProgrammed():
		return "programming" // it has not acknowledged its initial state
	case a.GetLagSequences() > 0:
		return "behind"
	}
	return "programmed"
}

// LastError says what a client could not program most recently, as of now by the server's clock. It
// is empty if there is no such error.
func LastError(a *pb.AgentStatus, now time.Time) string {
	e := a.GetLastError()
	if e == nil {
		return ""
	}
	text := fmt.Sprintf("%s ago, %s: %s", Age(now.Sub(e.GetTime().AsTime())), e.GetObject(), e.GetReason())
	if e.GetNodeName() != "" {
		text = e.GetNodeName() + ", " + text
	}
	return text
}

// Span formats a duration, and returns an empty string if it is not known yet.
func Span(d *durationpb.Duration) string {
	if d == nil {
		return ""
	}
	return Age(d.AsDuration())
}

// LastNodes names the last nodes of a publish, with the times that they took.
func LastNodes(nodes []*pb.NodeTime) string {
	var out []string
	for _, n := range nodes {
		out = append(out, fmt.Sprintf("%s (%s)", n.GetNodeName(), cmp.Or(Span(n.GetTime()), "lacks it")))
	}
	return strings.Join(out, ", ")
}
