package connection

import (
	"strings"

	"golang.org/x/time/rate"

	"github.com/slicecast/slicecast/agent/client/cache"
)

// The constants below bound what a server can make a client keep or do. Packages wire, cache and
// discovery have further bounds. A server that exceeds a bound breaks the protocol, and the client
// leaves it for another one.
const (
	// Once a stream has made the client ask for cache.MaxUnfit objects, it may cause askedPerSecond
	// more each second.
	askedPerSecond = 100
	// maxNodes bounds the number of Nodes that a relay accepts before it is in sync.
	maxNodes = 1 << 17
	// maxPath bounds the length of Welcome.path, which is the number of relays in a row.
	maxPath = 64
	// maxText bounds the length, in bytes, of a server's name and version.
	maxText = 256
	// maxHeaders bounds the size, in bytes, of a server's headers and trailers. The trailers hold
	// the status that a stream ends with.
	maxHeaders = 16 << 10
)

// newAsked returns the limiter of the objects that one stream may make the client ask for.
func newAsked() *rate.Limiter { return rate.NewLimiter(askedPerSecond, cache.MaxUnfit) }

// clip returns the first maxText bytes of s, without keeping the memory of the rest.
func clip(s string) string {
	if len(s) <= maxText {
		return s
	}
	return strings.ToValidUTF8(strings.Clone(s[:maxText]), "")
}
