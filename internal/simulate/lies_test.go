// This file is servers and relays that lie: somebody has taken them over. They forge what they send
// under true versions, leave out what is true, and claim digests, epochs and resource versions that
// are not so. A liar lies to everybody until another process takes its place. Whom it has deceived
// is exempt from what is checked until everything is well again.
package simulate

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// lie is what a server or relay lies about. Its clients' streams tell it.
type lie struct {
	about uint8 // the bits below; 0 means that it tells the truth
	// epoch and sequences are those of another server; epoch is 0 if there is none.
	epoch     uint64
	sequences []uint64
}

const (
	forges       uint8 = 1 << iota // sends other content under true versions
	disguises                      // adds fields that nobody knows, so that nobody can tell
	withholds                      // leaves out objects and removals
	miscounts                      // names other digests, each time different ones
	exaggerates                    // names resource versions far ahead
	impersonates                   // names the epoch and positions of another server
	lies                           // the number of combinations
)

// farAhead is a resource version that no cluster reaches.
const farAhead = 1 << 40

// maxPause is the longest pause of a client that has lost its server.
const maxPause = 30 * time.Second

// letLie replaces a server or relay by one that lies.
func (w *world) letLie(s step) string {
	o, other := pick(w.servers, s.a), pick(w.servers, s.a+1)
	if o.life == nil {
		return ""
	}
	l := lie{about: 1 + uint8(s.b)%(lies-1)}
	_ = w.ask(other, func(ctx context.Context, c pb.DebugServiceClient) error {
		r, err := c.GetStatus(ctx, &pb.GetStatusRequest{})
		if l.epoch = r.GetEpoch(); err == nil {
			_, l.sequences, err = listShards(ctx, c)
		}
		return err
	})
	o.kill()
	o.start()
	w.setLie(o.host(), l)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.deceived[o.name] = true
	return fmt.Sprintf("%s is replaced by a liar, %06b", o.name, l.about)
}

// endLies replaces the liars by honest servers.
func (w *world) endLies() {
	for _, o := range w.servers {
		if w.lieOf(o.host()).about != 0 && o.life != nil {
			o.kill()
			o.start()
		}
	}
}

// setLie sets how the server or relay of a host lies.
func (w *world) setLie(host string, l lie) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.liars[host] = l
}

// lieOf returns how the server or relay of a host lies.
func (w *world) lieOf(host string) lie {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.liars[host]
}

// believe notes that a client has received a message from a host.
func (w *world) believe(client, host string, lied bool) {
	relay := slices.IndexFunc(w.servers, func(s *server) bool { return s.relayed && s.host() == host })
	w.mu.Lock()
	defer w.mu.Unlock()
	if lied || relay >= 0 && w.deceived[w.servers[relay].name] {
		w.deceived[client] = true
	}
}

// undeceive forgets who was deceived. Checkpoints from before may be false. What nodes have seen
// may be so until their next stream has waited for it, and not afterwards.
func (w *world) undeceive() {
	w.mu.Lock()
	some := len(w.deceived) > 0
	clear(w.deceived)
	w.mu.Unlock()
	if !some {
		return
	}
	for _, n := range w.nodes {
		for _, s := range w.servers {
			w.network.reset(n.host, s.host())
		}
	}
	// Nodes and relays may pause before their next stream. There, the server waits first for
	// Services and slices, or for a relay's Nodes, and then for the rest.
	w.pass(maxPause + 2*maxBehindWait + 5*time.Second)
	for _, n := range w.nodes {
		if v := n.agent.cache.Status().ResourceVersions; v.Services >= farAhead || v.Slices >= farAhead || v.Nodes >= farAhead {
			w.violated("%s has seen %+v, as a liar said before its last stream", n.name, v)
		}
		n.disk.put(nil)
		n.disk.mu.Lock()
		n.disk.kept = nil
		n.disk.mu.Unlock()
	}
}

// tell changes the nth response of a stream as a lie demands, and reports whether it has.
func (l lie) tell(r *pb.StreamResponse, n int) (lied bool) {
	before := proto.CloneOf(r)
	far := func(v **pb.ResourceVersions) {
		if l.about&exaggerates != 0 && *v != nil {
			*v = &pb.ResourceVersions{Services: farAhead, Slices: farAhead, Nodes: farAhead}
		}
	}
	digest := func(b []byte) {
		if l.about&miscounts != 0 && len(b) > 1 {
			b[0], b[1] = b[0]+1, byte(n)
		}
	}
	switch {
	case r.GetWelcome() != nil:
		if l.about&impersonates != 0 && l.epoch != 0 {
			r.GetWelcome().Epoch = l.epoch
		}
	case r.GetShardUpdate() != nil:
		u := r.GetShardUpdate()
		l.forge(u)
		if l.about&exaggerates != 0 && u.GetSlicesResourceVersion() != 0 {
			u.SlicesResourceVersion = farAhead
		}
	case r.GetNodeUpdate() != nil:
		if node := r.GetNodeUpdate().GetNode(); node != nil && l.about&forges != 0 {
			node.Labels["topology.kubernetes.io/zone"] = "elsewhere"
		}
	case r.GetInSync() != nil:
		far(&r.GetInSync().ResourceVersions)
		if l.about&impersonates != 0 && len(l.sequences) > 0 {
			r.GetInSync().Sequences = l.sequences
		}
	case r.GetHeartbeat() != nil:
		if n%2 == 0 { // also not together with what it says of updates
			far(&r.GetHeartbeat().ResourceVersions)
		}
		digest(r.GetHeartbeat().GetDigest())
	case r.GetDigests() != nil:
		digest(r.GetDigests().GetDigests())
	}
	return !proto.Equal(before, r)
}

// forge changes an update.
func (l lie) forge(u *pb.ShardUpdate) {
	if l.about&withholds != 0 {
		u.Removed = nil
		u.Slices = u.GetSlices()[min(1, len(u.GetSlices())):]
	}
	redirect := func(endpoints []*pb.Endpoint) {
		if len(endpoints) > 0 { // the last address stays the highest
			last := endpoints[len(endpoints)-1]
			if strings.Contains(last.GetAddress(), ":") {
				last.Address = "fdff::66"
			} else {
				last.Address = "203.0.113.66"
			}
		}
	}
	if l.about&forges != 0 {
		for _, s := range u.GetSlices() {
			redirect(s.GetEndpoints())
		}
		for _, d := range u.GetSliceDeltas() {
			redirect(d.GetEndpoints())
		}
		for _, s := range u.GetServices() {
			s.ClientIpAffinitySeconds = 4711
		}
	}
	if l.about&disguises != 0 {
		for _, s := range u.GetSlices() {
			addUnknown(s)
		}
		for _, s := range u.GetServices() {
			addUnknown(s)
		}
	}
}

// digests returns the digests of the shards that hold the truth.
func (c *cluster) digests(shards uint32) []model.Digest {
	c.mu.Lock()
	defer c.mu.Unlock()
	convert := source.NewConverter("")
	return model.ShardDigests(shards, func(yield func(model.Object, model.Version) bool) {
		identity, _ := convert.FromService(c.identity())
		more := yield(identity, identity.ContentVersion())
		for _, o := range c.all() {
			switch e := o.now(); {
			case !more || e.number == 0:
			case e.service != nil:
				m, _ := convert.FromService(o.serviceObject(e, 1))
				more = yield(m, m.ContentVersion())
			default:
				m, _ := convert.FromEndpointSlice(o.sliceObject(e, 1))
				more = yield(m, m.ContentVersion())
			}
		}
	})
}

// diverges returns how servers and agents differ from the truth. Those of an older form may.
func (w *world) diverges() error {
	want := w.cluster.digests(w.shards)
	for _, n := range w.nodes {
		if _, have := n.agent.cache.Digests(); n.form != older && !slices.Equal(have, want) {
			return fmt.Errorf("%s has the digests %v and should have %v", n.name, have, want)
		}
	}
	for _, s := range w.servers {
		var have []model.Digest
		err := w.ask(s, func(ctx context.Context, c pb.DebugServiceClient) (err error) {
			have, _, err = listShards(ctx, c)
			return err
		})
		if err != nil || !slices.Equal(have, want) {
			return fmt.Errorf("%s has the digests %v and should have %v: %w", s.name, have, want, err)
		}
	}
	return nil
}

func listShards(ctx context.Context, c pb.DebugServiceClient) (digests []model.Digest, sequences []uint64, err error) {
	r, err := c.ListShards(ctx, &pb.ListShardsRequest{})
	for _, s := range r.GetShards() {
		digests, sequences = append(digests, model.Digest(s.GetDigest())), append(sequences, s.GetSequence())
	}
	return digests, sequences, err
}

// ask lets the operator call a server.
func (w *world) ask(s *server, call func(context.Context, pb.DebugServiceClient) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	conn, err := grpc.NewClient(s.address.String(), append(w.credentials(operatorName), grpc.WithContextDialer(w.operator.dialGRPC))...)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	return call(ctx, pb.NewDebugServiceClient(conn))
}
