package app

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/slicecast/slicecast/internal/show"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

type statusReport struct {
	status  *pb.GetStatusResponse
	agents  []*pb.AgentStatus
	shards  *pb.ListShardsResponse // nil if not requested
	service *pb.GetServiceResponse // nil if agents were requested
	gone    string                 // the Service of --lacks, if the server does not have it
}

// Fields implements show.Report.
func (r *statusReport) Fields() []show.Field {
	fields := []show.Field{{Name: "status", Message: r.status}}
	if r.service != nil {
		fields = append(fields, show.Field{Name: "service", Message: r.service})
	} else {
		fields = append(fields, listField("agents", r.agents))
	}
	if r.shards != nil {
		fields = append(fields, listField("shards", r.shards.GetShards()))
	}
	return fields
}

func listField[M proto.Message](name string, messages []M) show.Field {
	f := show.Field{Name: name}
	for _, m := range messages {
		f.List = append(f.List, m)
	}
	return f
}

// Print implements show.Report.
func (r *statusReport) Print(out *show.Page) {
	r.printServer(out)
	r.printConvergences(out)
	if r.shards != nil {
		r.printShards(out)
	}
	if r.service != nil {
		r.printService(out)
	} else {
		r.printAgents(out)
		r.printWarnings(out)
	}
}

func (r *statusReport) since(t *timestamppb.Timestamp) string {
	return show.Age(r.status.GetTime().AsTime().Sub(t.AsTime()))
}

func (r *statusReport) printServer(out *show.Page) {
	s := r.status
	state := "serving"
	switch {
	case s.GetDraining():
		state = "draining"
	case !s.GetSource().GetSynced():
		state = "not synced with its source yet"
	case s.GetSource().GetStaleSince() != nil, s.GetUpstream().GetStaleSince() != nil,
		s.GetUpstream().GetServer().GetStaleSince() != nil:
		state = "stale"
	}
	out.Row("Server", fmt.Sprintf("%s, version %s, up %s, %s",
		s.GetServerName(), s.GetServerVersion(), r.since(s.GetStartTime()), state))
	source := s.GetSource().GetKind()
	if v := s.GetSource().GetResourceVersions(); v != nil {
		source += fmt.Sprintf(", resource versions %d (Services), %d (EndpointSlices)", v.GetServices(), v.GetSlices())
	}
	if at := s.GetSource().GetLastEventTime(); at != nil {
		source += fmt.Sprintf(", last event %s ago", r.since(at))
	}
	if since := s.GetSource().GetStaleSince(); since != nil {
		source += fmt.Sprintf(", may lack changes of the last %s: %s", r.since(since), s.GetSource().GetLastError())
	}
	if up := s.GetUpstream(); up != nil {
		source += ", " + r.upstream(up)
	}
	out.Row("Source", source)
	size := s.GetSize()
	out.Row("State", fmt.Sprintf("%d Services, %d slices, %d endpoints in %d shards, epoch %016x",
		size.GetServices(), size.GetSlices(), size.GetEndpoints(), size.GetShards(), s.GetEpoch()))
	var streams []string
	for _, c := range s.GetStreams() {
		streams = append(streams, show.Plural(show.KindName(c.GetKind()), c.GetCount()))
	}
	out.Row("Streams", fmt.Sprintf("%s; %s served",
		cmp.Or(strings.Join(streams, ", "), "none"), show.Plural("node", s.GetNodes())))
	var warnings []string
	for _, w := range s.GetWarnings() {
		warnings = append(warnings, fmt.Sprintf("%s on %s", wire.WarningName(w.GetWarning()), show.Plural("node", w.GetNodes())))
	}
	if len(warnings) > 0 {
		out.Row("Warnings", strings.Join(warnings, ", "))
	}
	var servers []string
	for _, x := range s.GetServers() {
		servers = append(servers, x.GetAddress())
	}
	if len(servers) > 0 {
		out.Row("Servers", strings.Join(servers, ", "))
	}
}

func (r *statusReport) upstream(up *pb.UpstreamStatus) string {
	if !up.GetConnected() {
		text := "not connected yet"
		if up.GetStaleSince() != nil {
			text = "not connected for " + r.since(up.GetStaleSince())
		}
		if up.GetLastError() != "" {
			text += ": " + up.GetLastError()
		}
		return text
	}
	s := up.GetServer()
	text := fmt.Sprintf("from %s at %s, version %s, in sync for %s",
		s.GetName(), s.GetAddress(), s.GetVersion(), r.since(s.GetSince()))
	if since := s.GetStaleSince(); since != nil {
		text += fmt.Sprintf(", which may lack changes of the last %s", r.since(since))
	}
	if n := len(up.GetPath()); n > 1 {
		text += fmt.Sprintf(", %d servers away from the root", n)
	}
	return text
}

func (r *statusReport) printConvergences(out *show.Page) {
	s := r.status
	if len(s.GetConvergences()) == 0 {
		return
	}
	list := s.GetConvergences()
	title := "Latest changes, and how long the nodes took to program them"
	if n := s.GetOpenConvergences(); n > 0 {
		title += fmt.Sprintf("; not yet on all nodes: %d", n)
		oldest := s.GetOldestOpenConvergence()
		if !slices.ContainsFunc(list, func(c *pb.Convergence) bool { return proto.Equal(c, oldest) }) {
			list = append(list, oldest)
		}
	}
	out.Title("%s", title)
	out.Row("AGE", "SHARD", "SEQUENCE", "NODES", "LACKING", "50%", "99%", "100%", "LAST")
	for _, c := range list {
		out.Row(r.since(c.GetPublishTime()), fmt.Sprint(c.GetShard()), fmt.Sprint(c.GetSequence()),
			fmt.Sprint(c.GetNodes()), fmt.Sprint(c.GetLacking()),
			show.Span(c.GetTimeToHalf()), show.Span(c.GetTimeToMost()), show.Span(c.GetTimeToAll()), show.LastNodes(c.GetLast()))
	}
}

func (r *statusReport) printAgents(out *show.Page) {
	if r.gone != "" {
		out.Title("The server has no Service %s: check its name. If it was removed, these clients still have it",
			r.gone)
	}
	out.Title("%s", show.Plural("client", len(r.agents)))
	if len(r.agents) == 0 {
		return
	}
	out.Row("NODE", "KIND", "STATE", "LAG", "BEHIND", "SINCE", "ADDRESS", "PROGRAMMER", "VERSION", "SENT", "ERRORS", "LAST ERROR")
	for _, a := range r.agents {
		behind := ""
		if a.GetLagSequences() > 0 {
			behind = fmt.Sprint(a.GetLagSequences())
		}
		out.Row(a.GetNodeName(), show.Kind(a), show.State(a), show.Span(a.GetLag()), behind, r.since(a.GetSince()), a.GetAddress(),
			a.GetProgrammer(), a.GetClientVersion(), show.Bytes(a.GetSentBytes()), fmt.Sprint(len(a.GetErrors())), show.LastError(a, r.status.GetTime().AsTime()))
	}
}

// printWarnings prints what should be mended on nodes, which is in no column of the clients.
func (r *statusReport) printWarnings(out *show.Page) {
	titled := false
	for _, a := range r.agents {
		for _, w := range a.GetWarnings() {
			if !titled {
				out.Title("Warnings")
				out.Row("NODE", "WARNING", "SINCE", "REASON")
				titled = true
			}
			node := cmp.Or(w.GetNodeName(), a.GetNodeName())
			out.Row(node, wire.WarningName(w.GetWarning()), r.since(w.GetTime()), w.GetReason())
		}
	}
}

func (r *statusReport) printShards(out *show.Page) {
	out.Title("Shards")
	out.Row("SHARD", "SEQUENCE", "DIGEST", "OBJECTS")
	for _, s := range r.shards.GetShards() {
		out.Row(fmt.Sprint(s.GetShard()), fmt.Sprint(s.GetSequence()), show.Hash(s.GetDigest()), fmt.Sprint(s.GetObjects()))
	}
}

func (r *statusReport) printService(out *show.Page) {
	held := r.service
	out.Title("")
	if s := held.GetService(); s == nil {
		first := held.GetSlices()[0]
		out.Row("Service", first.GetNamespace()+"/"+first.GetService()+" does not exist, but slices of it do")
	} else {
		out.Row("Service", fmt.Sprintf("%s/%s, %s, version %s",
			s.GetNamespace(), s.GetName(), show.EnumName(s.GetType(), "SERVICE_TYPE_"), show.Hash(s.GetVersion())))
		addresses := slices.Concat(s.GetClusterIps(), s.GetExternalIps())
		for _, i := range s.GetLoadBalancerIngress() {
			addresses = append(addresses, i.GetIp())
		}
		out.Row("Addresses", strings.Join(addresses, ", "))
		var ports []string
		for _, p := range s.GetPorts() {
			text := portName(p.GetName(), p.GetPort(), p.GetProtocol())
			if p.GetNodePort() > 0 {
				text += fmt.Sprintf(" (node port %d)", p.GetNodePort())
			}
			ports = append(ports, text)
		}
		out.Row("Ports", strings.Join(ports, ", "))
	}
	out.Row("Position", fmt.Sprintf("shard %d, last changed at sequence %d of %d",
		held.GetShard(), held.GetChangedSequence(), held.GetSequence()))
	for _, s := range held.GetSlices() {
		r.printSlice(out, s)
	}
}

func (r *statusReport) printSlice(out *show.Page, s *pb.Slice) {
	var ports []string
	for _, p := range s.GetPorts() {
		ports = append(ports, portName(p.GetName(), p.GetPort(), p.GetProtocol()))
	}
	changed := ""
	if ms := s.GetLastChangeTriggerTimeMs(); ms > 0 {
		changed = fmt.Sprintf(", changed %s ago", r.since(timestamppb.New(time.UnixMilli(ms))))
	}
	out.Title("EndpointSlice %s/%s, %s, ports %s, version %s%s",
		s.GetNamespace(), s.GetName(), show.EnumName(s.GetAddressType(), "ADDRESS_TYPE_"),
		strings.Join(ports, ", "), show.Hash(s.GetVersion()), changed)
	if len(s.GetEndpoints()) == 0 {
		out.Row("no endpoints")
		return
	}
	out.Row("ADDRESS", "READY", "SERVING", "TERMINATING", "NODE", "ZONE", "HINTS")
	for _, e := range s.GetEndpoints() {
		out.Row(e.GetAddress(), strconv.FormatBool(e.GetReady()), strconv.FormatBool(e.GetServing()),
			strconv.FormatBool(e.GetTerminating()), e.GetNodeName(), e.GetZone(),
			strings.Join(slices.Concat(e.GetZoneHints(), e.GetNodeHints()), ","))
	}
}

func portName(name string, port uint32, protocol pb.Protocol) string {
	text := fmt.Sprintf("%d/%s", port, show.EnumName(protocol, "PROTOCOL_"))
	if name != "" {
		text = name + " " + text
	}
	return text
}
