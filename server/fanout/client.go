package fanout

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"google.golang.org/grpc/peer"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

const (
	// maxNodeName is the length of the longest valid name of a Node, in bytes.
	maxNodeName = 253
	// maxShards is the largest number of shards that any server has.
	maxShards = 4096
	// maxText bounds what is kept of a text from a client, in bytes.
	maxText = 512
)

// client is who a session serves: what its Hello says of it, and the user that it is admitted as.
// It does not change after the admission.
type client struct {
	kind                pb.ClientKind
	node                string // empty for a relay, and for an observer that follows no Node
	peer                string // network address
	user                string
	version, programmer string
	compressed, buckets bool // capabilities
}

func (c *client) isAgent() bool { return c.kind == pb.ClientKind_CLIENT_KIND_AGENT }
func (c *client) isRelay() bool { return c.kind == pb.ClientKind_CLIENT_KIND_RELAY }

// identity returns the identity whose share of the server the client uses.
func (c *client) identity() identity {
	if c.isAgent() {
		return identity{node: c.node}
	}
	return identity{user: c.user}
}

type greeting struct {
	client client
	state  clientState
	// probe means that the client only wants a Welcome.
	probe bool
}

// newGreeting validates a Hello. ctx is the stream's, and has the client's address.
func newGreeting(ctx context.Context, hello *pb.Hello) (g greeting, err error) {
	capable := func(of pb.Capability) bool { return slices.Contains(hello.GetCapabilities(), of) }
	g.client = client{
		kind: cmp.Or(hello.GetKind(), pb.ClientKind_CLIENT_KIND_OBSERVER), node: hello.GetNodeName(),
		version: clip(hello.GetClientVersion()), programmer: clip(hello.GetProgrammer()),
		compressed: capable(pb.Capability_CAPABILITY_ZSTD), buckets: capable(pb.Capability_CAPABILITY_BUCKETS),
	}
	if p, ok := peer.FromContext(ctx); ok {
		g.client.peer = p.Addr.String()
	}
	switch c := &g.client; {
	case c.isAgent() && c.node == "", c.isRelay() && c.node != "":
		return g, invalid("invalid Hello of kind %v with node name %q: an agent needs a name, and a relay "+
			"has none", c.kind, c.node)
	case len(c.node) > maxNodeName:
		return g, invalid("invalid Hello: the node name has %d bytes: use at most %d",
			len(c.node), maxNodeName)
	}
	g.probe = hello.GetProbe()
	g.state, err = newClientState(hello)
	return g, err
}

// clientState is what a client holds when its stream begins, according to its Hello.
type clientState struct {
	epoch uint64
	// sequences has the client's position in each shard, by shard number; 0 means none.
	sequences   []uint64
	digest      model.Digest // of the whole state
	versions    model.ResourceVersions
	cluster     int64        // of the content that the client holds; 0 means unknown
	nodesDigest model.Digest // of the Nodes that a relay holds
}

func newClientState(hello *pb.Hello) (clientState, error) {
	c := clientState{
		epoch: hello.GetEpoch(), sequences: hello.GetSequences(),
		versions: wire.ResourceVersionsFromProto(hello.GetResourceVersions()), cluster: hello.GetCluster(),
	}
	if n := len(c.sequences); n > maxShards {
		return c, invalid("invalid Hello: %d sequences: a server has at most %d shards", n, maxShards)
	}
	for _, d := range []struct {
		field string
		from  []byte
		to    *model.Digest
	}{{"digest", hello.GetDigest(), &c.digest}, {"nodes_digest", hello.GetNodesDigest(), &c.nodesDigest}} {
		switch len(d.from) {
		case 0:
		case model.HashSize:
			*d.to = model.Digest(d.from)
		default:
			return c, invalid("invalid Hello: the %s has %d bytes: use %d bytes",
				d.field, len(d.from), model.HashSize)
		}
	}
	return c, nil
}

// content returns the resource versions that the client has seen, except for that of Nodes.
func (c clientState) content() model.ResourceVersions {
	v := c.versions
	v.Nodes = 0
	return v
}

func (c clientState) empty() bool { return c.digest == model.Digest{} }

func (c clientState) hasShardsOf(s *store.Store) bool { return uint32(len(c.sequences)) == s.Shards() }

// position returns the client's position in a shard. ok reports whether the changes since then are
// known. Position 0 means that the client was cut off before it received the shard in this epoch,
// so it may hold any state.
func (c clientState) position(s *store.Store, snapshot *store.Snapshot) (at uint64, ok bool) {
	if !c.hasShardsOf(s) || c.epoch != s.Epoch() {
		return 0, false
	}
	at = c.sequences[snapshot.Shard()]
	return at, snapshot.Knows(at)
}

// equals reports whether the client holds the same content as the store, at which sequences.
func (c clientState) equals(s *store.Store) (sequences []uint64, ok bool) {
	digest, sequences := s.Digest()
	return sequences, c.hasShardsOf(s) && c.digest == digest
}

func clip(s string) string {
	if len(s) > maxText {
		return strings.ToValidUTF8(s[:maxText], "") + "…"
	}
	return s
}
