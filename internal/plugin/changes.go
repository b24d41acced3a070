package plugin

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/show"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

func newChangesCommand(o *options) *cobra.Command {
	out := &show.Options{Wide: true}
	c := &cobra.Command{
		Use:   "changes",
		Short: "Show the latest changes, and how long the nodes took to program them",
		Long: `changes shows the latest changes of Services and EndpointSlices, and how long the nodes of all servers took to program
them. Servers with the same change are one line, whose times are those of the slowest server. The nodes of a server that
has not seen a change may lack it: they are counted as unknown, and the server is named.`,
		Example: `  kubectl slicecast changes
  kubectl slicecast changes --watch`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return o.run(c, out, func(ctx context.Context, f *fleet.Fleet) (report, error) { return askChanges(ctx, f) })
		},
	}
	addOutputFlags(c, out)
	return c
}

// changesReport is the report of changes.
type changesReport struct {
	servers
	changes []*change
}

// change is a change with its convergence on all servers that are not fed by one of them. These
// count the nodes of their relays.
type change struct {
	// Services are those that it concerns. MoreServices means that it concerns further ones.
	Services     []string `json:"services"`
	MoreServices bool     `json:"moreServices"`
	Shard        uint32   `json:"shard"`
	// AgeSeconds is how long ago the first server published it.
	AgeSeconds float64 `json:"ageSeconds"`
	// Nodes is the number of nodes that were connected, and Lacking how many of them lack it.
	Nodes   uint32 `json:"nodes"`
	Lacking uint32 `json:"lacking"`
	// Unknown is the number of nodes of the servers that have not seen the change. They are not
	// among Nodes.
	Unknown uint32 `json:"unknown"`
	// HalfSeconds, MostSeconds and AllSeconds are how long it took until 50 %, 99 % and all of the
	// nodes had it, at the slowest server; nil means that a server does not know it yet, or has not
	// seen the change.
	HalfSeconds *float64 `json:"halfSeconds"`
	MostSeconds *float64 `json:"mostSeconds"`
	AllSeconds  *float64 `json:"allSeconds"`
	// Servers is the change as each server has published it, and UnseenBy names the servers that have
	// not seen it.
	Servers  []published `json:"servers"`
	UnseenBy []string    `json:"unseenBy"`

	unseen           []unseen
	age              time.Duration
	half, most, last span
	nodes            []*pb.NodeTime // the last ones
}

// published is a change at a server.
type published struct {
	Server      string        `json:"server"`
	Convergence *show.Message `json:"convergence"`
}

// unseen is a server that has not seen a change.
type unseen struct {
	server string
	epoch  uint64
	nodes  uint32
}

// span is the longest of several times, unless one of them is not known yet.
type span struct {
	longest time.Duration
	open    bool
}

// changeKey identifies a change. Servers of one API server have the same resource versions.
type changeKey struct {
	shard            uint32
	services, slices uint64
	// server and sequence are set if the source has no resource versions.
	server   string
	sequence uint64
}

func askChanges(ctx context.Context, f *fleet.Fleet) (*changesReport, error) {
	answers, all, err := ask(ctx, f, func(ctx context.Context, conn *grpc.ClientConn) (*pb.GetStatusResponse, error) {
		return pb.NewDebugServiceClient(conn).GetStatus(ctx, &pb.GetStatusRequest{})
	})
	if err != nil {
		return nil, err
	}
	return &changesReport{servers: all, changes: mergeChanges(answers)}, nil
}

// mergeChanges merges the latest changes of servers, newest first. It leaves out relays of which a
// server that has answered counts the nodes.
func mergeChanges(answers []fleet.Answer[*pb.GetStatusResponse]) []*change {
	answers = slices.DeleteFunc(slices.Clone(answers), func(a fleet.Answer[*pb.GetStatusResponse]) bool {
		return a.Err != nil
	})
	epochs := make(map[uint64]bool)
	for _, a := range answers {
		epochs[a.Value.GetEpoch()] = true
	}
	answers = slices.DeleteFunc(answers, func(a fleet.Answer[*pb.GetStatusResponse]) bool {
		return slices.ContainsFunc(a.Value.GetUpstream().GetPath(), func(epoch uint64) bool { return epochs[epoch] })
	})
	merged := make(map[changeKey]*change)
	var out []*change
	for _, a := range answers {
		list := a.Value.GetConvergences()
		if c := a.Value.GetOldestOpenConvergence(); c != nil && !slices.ContainsFunc(list, func(x *pb.Convergence) bool {
			return x.GetShard() == c.GetShard() && x.GetSequence() == c.GetSequence()
		}) {
			list = append(slices.Clip(list), c)
		}
		for _, c := range list {
			key := changeKey{shard: c.GetShard(), services: c.GetResourceVersions().GetServices(), slices: c.GetResourceVersions().GetSlices()}
			if c.GetResourceVersions() == nil {
				key.server, key.sequence = a.Server.String(), c.GetSequence()
			}
			m, ok := merged[key]
			if !ok {
				m = &change{Shard: c.GetShard()}
				merged[key] = m
				out = append(out, m)
			}
			m.add(a.Server.String(), a.Value, c)
		}
	}
	for key, m := range merged {
		m.findUnseen(key, answers)
		m.finish()
	}
	slices.SortStableFunc(out, func(a, b *change) int { return cmp.Compare(a.age, b.age) })
	return out
}

// findUnseen finds the servers that have not seen the change: their source has not reached its
// resource versions. A source that went back in time, as after a restore, has reached none of the
// versions before that, which is then also true of the server that published the change.
func (c *change) findUnseen(key changeKey, answers []fleet.Answer[*pb.GetStatusResponse]) {
	reached := func(a fleet.Answer[*pb.GetStatusResponse]) bool {
		r := a.Value.GetSource().GetResourceVersions()
		return r.GetServices() >= key.services && r.GetSlices() >= key.slices
	}
	published := func(a fleet.Answer[*pb.GetStatusResponse]) bool {
		return slices.ContainsFunc(c.Servers, func(p published) bool { return p.Server == a.Server.String() })
	}
	if !slices.ContainsFunc(answers, func(a fleet.Answer[*pb.GetStatusResponse]) bool { return published(a) && reached(a) }) {
		return
	}
	for _, a := range answers {
		source := a.Value.GetSource()
		if !source.GetSynced() || source.GetResourceVersions() == nil || reached(a) || published(a) {
			continue
		}
		c.unseen = append(c.unseen, unseen{server: a.Server.String(), epoch: a.Value.GetEpoch(), nodes: a.Value.GetNodes()})
		c.UnseenBy = append(c.UnseenBy, a.Server.String())
		c.Unknown += a.Value.GetNodes()
		if a.Value.GetNodes() > 0 {
			c.half.open, c.most.open, c.last.open = true, true, true
		}
	}
}

// add adds the change as a server has published it.
func (c *change) add(server string, status *pb.GetStatusResponse, p *pb.Convergence) {
	for _, s := range p.GetServices() {
		if name := s.GetNamespace() + "/" + s.GetName(); !slices.Contains(c.Services, name) {
			c.Services = append(c.Services, name)
		}
	}
	c.MoreServices = c.MoreServices || p.GetMoreServices()
	c.age = max(c.age, since(status, p.GetPublishTime().AsTime()))
	c.Nodes += p.GetNodes()
	c.Lacking += p.GetLacking()
	c.half.add(p.GetTimeToHalf())
	c.most.add(p.GetTimeToMost())
	c.last.add(p.GetTimeToAll())
	c.nodes = append(c.nodes, p.GetLast()...)
	c.Servers = append(c.Servers, published{Server: server, Convergence: &show.Message{Message: p}})
}

// finish sets what depends on all servers.
func (c *change) finish() {
	slices.Sort(c.Services)
	c.Services, c.UnseenBy = nonNil(c.Services), nonNil(c.UnseenBy)
	c.AgeSeconds = c.age.Seconds()
	c.HalfSeconds, c.MostSeconds, c.AllSeconds = c.half.seconds(), c.most.seconds(), c.last.seconds()
	// Those that lack it come first, and then the slowest ones.
	slices.SortStableFunc(c.nodes, func(a, b *pb.NodeTime) int {
		switch {
		case (a.GetTime() == nil) == (b.GetTime() == nil):
			return cmp.Compare(b.GetTime().AsDuration(), a.GetTime().AsDuration())
		case a.GetTime() == nil:
			return -1
		}
		return 1
	})
	c.nodes = c.nodes[:min(len(c.nodes), 3)]
}

// add adds the time of a server; nil means that it is not known yet.
func (s *span) add(d *durationpb.Duration) {
	s.longest, s.open = max(s.longest, d.AsDuration()), s.open || d == nil
}

// seconds returns the time in seconds; nil means that it is not known yet.
func (s span) seconds() *float64 {
	if s.open {
		return nil
	}
	return new(s.longest.Seconds())
}

// String formats the time; it is empty if it is not known yet.
func (s span) String() string {
	if s.open {
		return ""
	}
	return show.Age(s.longest)
}

// code implements report.
func (r *changesReport) code() int {
	return r.servers.code(slices.ContainsFunc(r.changes, func(c *change) bool { return c.Lacking+c.Unknown > 0 && c.age > slowChange }))
}

// Fields implements show.Report.
func (r *changesReport) Fields() []show.Field {
	return []show.Field{{Name: "changes", Value: nonNil(r.changes)}, {Name: "servers", Value: r.servers}}
}

// Print implements show.Report.
func (r *changesReport) Print(out *show.Page) {
	r.servers.print(out)
	r.printUnseen(out)
	out.Title("%s", show.Plural("change", len(r.changes)))
	if len(r.changes) > 0 {
		header := []string{"AGE", "SERVICES", "NODES", "LACKING", "UNKNOWN", "50%", "99%", "100%", "LAST"}
		if out.Wide {
			header = append(header, "SHARD", "SERVERS")
		}
		out.Row(header...)
		for _, c := range r.changes {
			out.Row(c.cells(out.Wide)...)
		}
	}
}

// printUnseen names the servers that have not seen one of the changes, with the oldest such change.
func (r *changesReport) printUnseen(out *show.Page) {
	oldest := make(map[string]time.Duration)
	nodes := make(map[string]uint32)
	for _, c := range r.changes {
		for _, u := range c.unseen {
			oldest[u.server], nodes[u.server] = max(oldest[u.server], c.age), u.nodes
		}
	}
	if len(oldest) == 0 {
		return
	}
	out.Title("Servers that have not seen all of the changes below, and whose nodes may lack them: %d", len(oldest))
	out.Row("SERVER", "NODES", "OLDEST CHANGE")
	for _, name := range slices.Sorted(maps.Keys(oldest)) {
		out.Row(name, fmt.Sprint(nodes[name]), show.Age(oldest[name]))
	}
}

func (c *change) cells(wide bool) []string {
	names := strings.Join(c.Services, ", ")
	if c.MoreServices {
		names += ", …"
	}
	cells := []string{
		show.Age(c.age), names, fmt.Sprint(c.Nodes), fmt.Sprint(c.Lacking), fmt.Sprint(c.Unknown), c.half.String(), c.most.String(), c.last.String(),
		show.LastNodes(c.nodes),
	}
	if wide {
		var on []string
		for _, s := range c.Servers {
			on = append(on, s.Server)
		}
		cells = append(cells, fmt.Sprint(c.Shard), strings.Join(on, ", "))
	}
	return cells
}
