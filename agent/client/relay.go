package client

import "github.com/slicecast/slicecast/internal/model"

// Relay makes the client that of another server, which feeds from the stream a store of its own. Its functions are called
// one after the other, in the order of the stream. All are required.
type Relay struct {
	// NodesDigest returns the digest of all Nodes that the relay holds, for Hello.
	NodesDigest func() model.Digest
	// Path takes Welcome.path, with which every stream begins. An error ends the stream: the relay would feed on itself.
	Path func(path []uint64) error
	// Applied hears of each Update after it was applied to the cache.
	Applied func(Applied)
	// Node hears of each Node that came or changed; nil: it is gone. The cache keeps none.
	Node func(name string, n *model.Node)
	// Ended hears that a stream that was welcomed has ended.
	Ended func()
	// Reached hears up to which resource versions everything has come, in all shards.
	Reached func(model.ResourceVersions)
	// InSync hears that everything has come that differs from what the relay held. The names are those of all Nodes: others no
	// longer exist. nil: the relay's digest of Nodes was right, and nothing of the kind is said.
	InSync func(nodes map[string]struct{})
}
