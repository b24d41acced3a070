package page

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/show"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

const (
	// maxLookups is how many questions about a node, Service or change are answered at a time.
	// Others wait.
	maxLookups = 2
	// lookupRate and lookupBurst bound the questions of all viewers, per second and at once. Each of
	// them may look at all clients. The page asks again every few seconds about what it shows.
	lookupRate, lookupBurst = 20, 60
	// maxProblems is how many errors and warnings of a client the page lists, of each kind.
	maxProblems = 64
)

// notFoundError says that a question is about something unknown.
type notFoundError string

// Error implements error.
func (e notFoundError) Error() string { return string(e) }

// lookup returns the handler of a question.
func (p *Page) lookup(ask func(*http.Request) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !p.rate.Allow() {
			p.refuse(reasonLookups, r)
			w.Header().Set("Retry-After", "1")
			http.Error(w, "too many questions: ask again in a second", http.StatusTooManyRequests)
			return
		}
		content, err := p.answer(r, ask)
		if err == nil {
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write(content) // if it fails, the viewer notices
			return
		}
		if r.Context().Err() != nil {
			return
		}
		code := http.StatusBadRequest
		if _, ok := errors.AsType[notFoundError](err); ok {
			code = http.StatusNotFound
		}
		http.Error(w, err.Error(), code)
	}
}

// answer returns the answer to a question as JSON. It holds one of the places of lookups only while
// it makes the answer, and not while the viewer reads it.
func (p *Page) answer(r *http.Request, ask func(*http.Request) (any, error)) ([]byte, error) {
	select {
	case p.lookups <- struct{}{}:
		defer func() { <-p.lookups }()
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	value, err := ask(r)
	if err != nil {
		return nil, err
	}
	return json.Marshal(value)
}

// nodeState is what the page says of one client.
type nodeState struct {
	Name       string    `json:"name"`
	Kind       string    `json:"kind"`
	Nodes      uint32    `json:"nodes"`
	State      string    `json:"state"`
	Address    string    `json:"address"`
	Version    string    `json:"version"`
	Programmer string    `json:"programmer"`
	Since      int64     `json:"since"`  // milliseconds since 1970
	Behind     uint64    `json:"behind"` // publishes
	Lag        *float64  `json:"lag"`    // milliseconds
	Sent       string    `json:"sent"`
	Errors     []problem `json:"errors"`
	Warnings   []problem `json:"warnings"`
	LastError  *problem  `json:"lastError"`
	More       bool      `json:"more"` // there are more errors or warnings than listed
}

// problem is an error or a warning.
type problem struct {
	Node   string `json:"node"`
	About  string `json:"about"`
	Reason string `json:"reason"`
	Time   int64  `json:"time"` // milliseconds since 1970
}

// node answers what the server knows of a client with an id that the event stream has named.
func (p *Page) node(r *http.Request) (any, error) {
	id, err := strconv.ParseUint(r.FormValue("id"), 10, 64)
	if err != nil {
		return nil, errors.New("the id is not a number")
	}
	rows := p.rows()
	for _, a := range p.options.Server.Agents(nil) {
		if row, ok := rows[keyOf(a)]; ok && row.id == id {
			return newNodeState(a), nil
		}
	}
	return nil, notFoundError("the node is not connected to this server any more")
}

// rows returns the rows of the latest sample, or nil if nobody watches.
func (p *Page) rows() map[key]row {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.last == nil {
		return nil
	}
	return p.last.rows
}

func newNodeState(a *pb.AgentStatus) nodeState {
	out := nodeState{
		Name: clean(cmp.Or(a.GetNodeName(), a.GetAddress())), Kind: show.KindName(a.GetKind()), Nodes: a.GetNodes(),
		State: show.State(a), Address: clean(a.GetAddress()), Version: clean(a.GetClientVersion()),
		Programmer: clean(a.GetProgrammer()), Since: milliseconds(a.GetSince()), Behind: a.GetLagSequences(),
		Lag: known(a.GetLag().AsDuration()), Sent: show.Bytes(a.GetSentBytes()), Errors: []problem{}, Warnings: []problem{},
		More: max(len(a.GetErrors()), len(a.GetWarnings())) > maxProblems,
	}
	failed := func(e *pb.AgentError) problem {
		return problem{clean(e.GetNodeName()), clean(e.GetObject()), clean(e.GetReason()), milliseconds(e.GetTime())}
	}
	for _, e := range a.GetErrors()[:min(len(a.GetErrors()), maxProblems)] {
		out.Errors = append(out.Errors, failed(e))
	}
	for _, w := range a.GetWarnings()[:min(len(a.GetWarnings()), maxProblems)] {
		out.Warnings = append(out.Warnings, problem{
			clean(w.GetNodeName()), wire.WarningName(w.GetWarning()), clean(w.GetReason()), milliseconds(w.GetTime()),
		})
	}
	if e := a.GetLastError(); e != nil {
		out.LastError = new(failed(e))
	}
	return out
}

// wayState is how far a change, or the latest change of a Service, has come.
type wayState struct {
	Shard    uint32 `json:"shard"`
	Sequence uint64 `json:"sequence"`
	// Change is the change; null if the server does not remember it.
	Change *changeState `json:"change"`
	// Nodes is the number of nodes that are served, and Lacking how many of them lack it.
	Nodes   uint32 `json:"nodes"`
	Lacking uint32 `json:"lacking"`
	// Lacks has the ids of the clients that lack it, as far as the page has them.
	Lacks []uint64 `json:"lacks"`
	// Service is what the server has of the Service; null for other questions.
	Service *serviceState `json:"service"`
}

// serviceState is what the server has of a Service.
type serviceState struct {
	Name      string   `json:"name"`
	Exists    bool     `json:"exists"`
	Type      string   `json:"type"`
	Addresses []string `json:"addresses"`
	Ports     []string `json:"ports"`
	Slices    int      `json:"slices"`
	Endpoints int      `json:"endpoints"`
	Ready     int      `json:"ready"`
}

// change answers how far a change has come.
func (p *Page) change(r *http.Request) (any, error) {
	shard, err := strconv.ParseUint(r.FormValue("shard"), 10, 32)
	sequence, err2 := strconv.ParseUint(r.FormValue("sequence"), 10, 64)
	if err := errors.Join(err, err2); err != nil {
		return nil, errors.New("the shard or the sequence is not a number")
	}
	return p.way(r.Context(), uint32(shard), sequence, p.options.Server.AgentsLacking(uint32(shard), sequence))
}

// way returns how far a shard's sequence has come, which these clients lack.
func (p *Page) way(ctx context.Context, shard uint32, sequence uint64, lacking []*pb.AgentStatus) (*wayState, error) {
	status, err := p.options.Server.GetStatus(ctx, &pb.GetStatusRequest{})
	if err != nil {
		return nil, err
	}
	out := &wayState{Shard: shard, Sequence: sequence, Lacks: []uint64{}, Nodes: status.GetNodes()}
	for _, c := range p.options.Server.Convergences() {
		if c.Shard == shard && c.Sequence == sequence {
			out.Change = new(p.newChange(c))
		}
	}
	rows := p.rows()
	for _, a := range lacking { // none of them is an observer
		if out.Lacking += a.GetNodes(); a.GetKind() == pb.ClientKind_CLIENT_KIND_AGENT && a.GetNodes() == 0 {
			out.Lacking++ // it does not even have the initial state
		}
		if row, ok := rows[keyOf(a)]; ok {
			out.Lacks = append(out.Lacks, row.id)
		}
	}
	return out, nil
}

// service answers how far the latest change of a Service has come.
func (p *Page) service(r *http.Request) (any, error) {
	name := model.ServiceKey{Namespace: r.FormValue("namespace"), Name: r.FormValue("name")}
	held, err := p.options.Server.GetService(r.Context(), &pb.GetServiceRequest{
		Service: &pb.ServiceName{Namespace: name.Namespace, Name: name.Name},
	})
	switch s, _ := status.FromError(err); s.Code() {
	case codes.OK:
	case codes.NotFound:
		return nil, notFoundError(clean(s.Message()))
	default:
		return nil, errors.New(clean(s.Message()))
	}
	lacking := slices.DeleteFunc(p.options.Server.Agents(&name), func(a *pb.AgentStatus) bool { return !a.GetLacks() })
	way, err := p.way(r.Context(), held.GetShard(), held.GetChangedSequence(), lacking)
	if err != nil {
		return nil, err
	}
	way.Service = newServiceState(name, held)
	return way, nil
}

func newServiceState(name model.ServiceKey, held *pb.GetServiceResponse) *serviceState {
	s := held.GetService()
	out := &serviceState{
		Name: clean(name.String()), Exists: s != nil, Slices: len(held.GetSlices()),
		Addresses: []string{}, Ports: []string{},
	}
	if s != nil {
		out.Type = show.EnumName(s.GetType(), "SERVICE_TYPE_")
	}
	addresses := slices.Concat(s.GetClusterIps(), s.GetExternalIps())
	for _, i := range s.GetLoadBalancerIngress() {
		addresses = append(addresses, i.GetIp())
	}
	for _, a := range addresses[:min(len(addresses), maxProblems)] {
		out.Addresses = append(out.Addresses, clean(a))
	}
	for _, port := range s.GetPorts()[:min(len(s.GetPorts()), maxProblems)] {
		out.Ports = append(out.Ports, clean(fmt.Sprintf("%s %d/%s", port.GetName(), port.GetPort(), show.EnumName(port.GetProtocol(), "PROTOCOL_"))))
	}
	for _, slice := range held.GetSlices() {
		out.Endpoints += len(slice.GetEndpoints())
		for _, e := range slice.GetEndpoints() {
			if e.GetReady() {
				out.Ready++
			}
		}
	}
	return out
}
