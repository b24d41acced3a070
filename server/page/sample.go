package page

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/slicecast/slicecast/internal/show"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/fanout"
)

const (
	// interval is how often the state is read, and viewers are sent what has changed.
	interval = time.Second
	// effort bounds the time that reading the state takes: a sample is reused for as many times as
	// long as taking it took.
	effort = 20
	// graceLag is how long a node may lack a change without being shown as behind. Agents and relays
	// hold acks back for up to 4 s while there are many changes.
	graceLag = 5 * time.Second
	// lagTolerance is by how much the beginning of a lag may move without being sent again.
	lagTolerance = 250 * time.Millisecond
	// maxRows bounds the clients that the page has. Those in trouble come first.
	maxRows = 32768
	// rowsPerMessage bounds a message, whose rows are 400 bytes at most.
	rowsPerMessage = 500
	// maxChanges is how many of the latest changes the page has.
	maxChanges = 16
)

// key identifies a client's stream.
type key struct {
	kind          pb.ClientKind
	node, address string
	since         time.Time
}

func keyOf(a *pb.AgentStatus) key {
	return key{a.GetKind(), a.GetNodeName(), a.GetAddress(), a.GetSince().AsTime()}
}

// row is an agent or relay as the page shows it.
type row struct {
	id                uint64
	name, kind, state string
	// lacking is when the oldest change that the client lacks was published, in milliseconds since
	// 1970, or 0.
	lacking          int64
	errors, warnings int
	nodes            uint32
}

// trouble reports whether the row needs attention.
func (r *row) trouble() bool { return r.state != "programmed" || r.errors > 0 || r.warnings > 0 }

// append appends the row as a JSON array.
func (r *row) append(to []byte) []byte {
	name, err := json.Marshal(r.name)
	if err != nil {
		panic(err) // strings can be marshaled
	}
	to = strconv.AppendUint(append(to, '['), r.id, 10)
	to = append(append(to, ','), name...)
	to = append(strconv.AppendQuote(append(to, ','), r.kind), ',')
	to = append(strconv.AppendQuote(to, r.state), ',')
	to = append(strconv.AppendInt(to, r.lacking, 10), ',')
	to = append(strconv.AppendInt(to, int64(r.errors), 10), ',')
	to = append(strconv.AppendInt(to, int64(r.warnings), 10), ',')
	return append(strconv.AppendUint(to, uint64(r.nodes), 10), ']')
}

// serverState is what the page says of the server.
type serverState struct {
	Name     string `json:"name"`
	Version  string `json:"version"`
	Started  int64  `json:"started"` // milliseconds since 1970
	State    string `json:"state"`
	Source   string `json:"source"`
	Services uint32 `json:"services"`
	Slices   uint32 `json:"slices"`
	// Endpoints counts those of all slices.
	Endpoints uint32 `json:"endpoints"`
	Nodes     uint32 `json:"nodes"`
	// Clients is the number of agents and relays, and Shown how many of them the page has.
	Clients  int      `json:"clients"`
	Shown    int      `json:"shown"`
	Warnings []string `json:"warnings"`
	// Open is the number of changes that some node lacks.
	Open uint32 `json:"open"`
}

// changeState is a change as the page shows it. Times are in milliseconds.
type changeState struct {
	Shard     uint32 `json:"shard"`
	Sequence  uint64 `json:"sequence"`
	Published int64  `json:"published"` // since 1970
	Nodes     int    `json:"nodes"`
	Lacking   int    `json:"lacking"`
	// Times are those until 50 %, 99 % and all of the nodes had it; null means not yet.
	Times    []*float64 `json:"times"`
	Services []string   `json:"services"`
	More     bool       `json:"more"`
	Last     []nodeTime `json:"last"`
	// Curve says how many nodes had the change within a time: pairs of both.
	Curve [][2]float64 `json:"curve"`
}

type nodeTime struct {
	Node string   `json:"node"`
	Time *float64 `json:"time"` // null means that the node lacks the change
}

// sample is what the page shows at one time. It does not change.
type sample struct {
	number uint64
	taken  time.Time
	cost   time.Duration // of taking it
	rows   map[key]row
	// server and changes are encoded.
	server, changes []byte
	// delta has the messages that lead from the previous sample to this one, and full returns those
	// that lead to it from nothing.
	delta []byte
	full  func() []byte
}

// sample returns a sample that is not older than interval, unless taking one costs too much.
func (p *Page) sample() (*sample, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	// Viewers ask once per interval, and not all of them at the same time.
	if s := p.last; s != nil && now.Sub(s.taken) < max(p.interval*9/10, effort*s.cost) {
		return s, nil
	}
	s, err := p.takeLocked(now)
	if err != nil {
		return nil, err
	}
	s.cost = time.Since(now)
	p.last = s
	return s, nil
}

// takeLocked reads the state as of now.
func (p *Page) takeLocked(now time.Time) (*sample, error) {
	status, err := p.options.Server.GetStatus(context.Background(), &pb.GetStatusRequest{})
	if err != nil {
		return nil, err
	}
	p.number++
	s := &sample{number: p.number, taken: now, rows: make(map[key]row)}
	previous := p.last
	if previous == nil {
		previous = &sample{}
	}
	clients := 0
	var changed []row
	for _, a := range shown(p.options.Server.Agents(nil), &clients) {
		k := keyOf(a)
		before, known := previous.rows[k]
		if !known {
			p.id++
			before.id = p.id
		}
		r := newRow(a, before, now)
		s.rows[k] = r
		if !known || r != before {
			changed = append(changed, r)
		}
	}
	if s.server, err = json.Marshal(newServerState(status, clients, len(s.rows))); err != nil {
		return nil, err
	}
	if s.changes, err = json.Marshal(p.changes()); err != nil {
		return nil, err
	}
	s.delta = s.messages(changed, gone(previous.rows, s.rows), previous)
	s.full = sync.OnceValue(func() []byte {
		rows := slices.Collect(maps.Values(s.rows))
		// The page sorts them, and does so faster if they are sorted.
		slices.SortFunc(rows, func(a, b row) int { return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.id, b.id)) })
		return append([]byte("event: reset\ndata: {}\n\n"), s.messages(rows, nil, &sample{})...)
	})
	return s, nil
}

// shown returns the agents and relays that the page has, of which it counts all.
func shown(clients []*pb.AgentStatus, count *int) []*pb.AgentStatus {
	clients = slices.DeleteFunc(clients, func(a *pb.AgentStatus) bool { return a.GetKind() == pb.ClientKind_CLIENT_KIND_OBSERVER })
	if *count = len(clients); *count <= maxRows {
		return clients
	}
	var well []*pb.AgentStatus
	now, first := time.Now(), 0
	for _, a := range clients {
		if r := newRow(a, row{}, now); r.trouble() {
			clients[first] = a
			first++
		} else {
			well = append(well, a)
		}
	}
	return append(clients[:first], well...)[:maxRows]
}

// newRow returns the row of a client. before has its id, and when the client's lag began.
func newRow(a *pb.AgentStatus, before row, now time.Time) row {
	r := row{
		id: before.id, name: clean(a.GetNodeName()), kind: show.KindName(a.GetKind()), state: show.State(a),
		errors: len(a.GetErrors()), warnings: len(a.GetWarnings()), nodes: a.GetNodes(),
	}
	if r.name == "" {
		r.name = clean(r.kind + " " + a.GetAddress())
	}
	switch lag := a.GetLag().AsDuration(); {
	case lag >= graceLag:
		r.lacking = now.Add(-lag).UnixMilli()
		if by := r.lacking - before.lacking; max(by, -by) < lagTolerance.Milliseconds() {
			r.lacking = before.lacking
		}
	case r.state == "behind":
		r.state = "programmed"
	}
	return r
}

// gone returns the ids of the rows that are not there any more.
func gone(before, now map[key]row) (ids []uint64) {
	for k, r := range before {
		if _, still := now[k]; !still {
			ids = append(ids, r.id)
		}
	}
	return ids
}

// messages returns the messages of the event stream that lead from a previous sample to this one,
// with these rows changed and gone. The last one says that the sample is complete.
func (s *sample) messages(changed []row, gone []uint64, previous *sample) []byte {
	var out []byte
	event := func(name string, data []byte) {
		out = fmt.Appendf(out, "event: %s\ndata: %s\n\n", name, data)
	}
	for part := range slices.Chunk(changed, rowsPerMessage) {
		data := []byte{'['}
		for i := range part {
			if i > 0 {
				data = append(data, ',')
			}
			data = part[i].append(data)
		}
		event("nodes", append(data, ']'))
	}
	for part := range slices.Chunk(gone, rowsPerMessage) {
		data, err := json.Marshal(part)
		if err != nil {
			panic(err) // numbers can be marshaled
		}
		event("gone", data)
	}
	if !bytes.Equal(s.server, previous.server) {
		event("server", s.server)
	}
	if !bytes.Equal(s.changes, previous.changes) {
		event("changes", s.changes)
	}
	event("complete", fmt.Appendf(nil, `{"time":%d}`, s.taken.UnixMilli()))
	return out
}

// since returns the messages that lead from a sample to this one. nil stands for nothing.
func (s *sample) since(before *sample) []byte {
	switch {
	case before == nil:
		return s.full()
	case before.number == s.number:
		return nil
	case before.number == s.number-1:
		return s.delta
	}
	return s.full()
}

func newServerState(s *pb.GetStatusResponse, clients, shown int) serverState {
	out := serverState{
		Name: clean(s.GetServerName()), Version: clean(s.GetServerVersion()), Started: milliseconds(s.GetStartTime()),
		State: "serving", Source: sourceOf(s), Services: s.GetSize().GetServices(), Slices: s.GetSize().GetSlices(),
		Endpoints: s.GetSize().GetEndpoints(), Nodes: s.GetNodes(), Clients: clients, Shown: shown,
		Open: s.GetOpenConvergences(), Warnings: []string{},
	}
	switch {
	case s.GetDraining():
		out.State = "draining"
	case !s.GetSource().GetSynced():
		out.State = "not synced with its source yet"
	}
	for _, w := range s.GetWarnings() {
		out.Warnings = append(out.Warnings, fmt.Sprintf("%s on %s", wire.WarningName(w.GetWarning()), show.Plural("node", w.GetNodes())))
	}
	return out
}

// sourceOf says where the server's state comes from and, if it is a relay, that it follows no
// server.
func sourceOf(s *pb.GetStatusResponse) string {
	up := s.GetUpstream()
	switch {
	case up == nil:
		return clean(s.GetSource().GetKind())
	case up.GetConnected():
		return clean("relay of " + up.GetServer().GetName() + " at " + up.GetServer().GetAddress())
	}
	return clean("relay, follows no server: " + up.GetLastError())
}

func milliseconds(t *timestamppb.Timestamp) int64 { return t.AsTime().UnixMilli() }

// changes returns the latest changes, newest first, and the oldest one that some node lacks.
func (p *Page) changes() []changeState {
	out := []changeState{}
	var oldest *fanout.Convergence // of those beyond
	for _, c := range p.options.Server.Convergences() {
		if len(out) < maxChanges {
			out = append(out, p.newChange(c))
		} else if c.Programmed < c.Nodes {
			oldest = &c
		}
	}
	if oldest != nil {
		out = append(out, p.newChange(*oldest))
	}
	return out
}

func (p *Page) newChange(c fanout.Convergence) changeState {
	out := changeState{
		Shard: c.Shard, Sequence: c.Sequence, Published: c.Published.UnixMilli(), Nodes: c.Nodes, Lacking: c.Nodes - c.Programmed,
		Services: []string{}, More: c.Changed.More, Last: []nodeTime{}, Curve: [][2]float64{},
	}
	for _, t := range c.Times {
		out.Times = append(out.Times, known(t))
	}
	for _, s := range c.Changed.Services {
		out.Services = append(out.Services, clean(s.String()))
	}
	for _, n := range c.Last {
		out.Last = append(out.Last, nodeTime{clean(n.Node), known(n.Time)})
	}
	for _, s := range p.options.Server.Steps(c.Shard, c.Sequence) {
		out.Curve = append(out.Curve, [2]float64{inMilliseconds(s.Time), float64(s.Nodes)})
	}
	return out
}

func inMilliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// known returns a time in milliseconds, or nil for 0, which stands for an unknown one.
func known(d time.Duration) *float64 {
	if d == 0 {
		return nil
	}
	return new(inMilliseconds(d))
}
