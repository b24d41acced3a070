package connection

import (
	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/internal/model"
)

// Relay holds the callbacks of a client that feeds a relay's store from another server. The client
// calls them one at a time, in the order of the stream. All are required.
type Relay struct {
	// NodesDigest returns the digest of all Nodes that the relay holds, for the Hello.
	NodesDigest func() model.Digest
	// Path is called with Welcome.path at the start of every stream. It returns an error, which
	// ends the stream, if the relay would be fed by itself.
	Path func(path []uint64) error
	// Applied is called with each Update after the cache has applied it.
	Applied func(cache.Applied)
	// Node is called with each Node that arrived or changed, or with nil if the Node no longer
	// exists. A relay's cache keeps no Nodes.
	Node func(name string, n *model.Node)
	// Ended is called when a welcomed stream has ended.
	Ended func()
	// Reached is called with the resource versions up to which all shards are complete.
	Reached func(model.ResourceVersions)
	// InSync is called when all differences from the relay's state have arrived. nodes holds the
	// names of all Nodes; the relay must drop all others. nil means that the relay's digest of
	// Nodes was right and that its Nodes stay.
	InSync func(nodes map[string]struct{})
}
