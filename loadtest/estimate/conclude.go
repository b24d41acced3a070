package estimate

import (
	"fmt"
	"time"

	"github.com/slicecast/slicecast/loadtest/performance"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/server/fanout"
)

// An API server sends a bookmark about once in bookmarkInterval on a watch without other events. A
// kube-proxy has two watches that matter here.
const (
	bookmarkInterval = time.Minute
	watches          = 2
)

const perMicro = 1e-6

func sizeText(v float64) string   { return report.FormatValue(v, report.Bytes) }
func rateText(v float64) string   { return sizeText(v) + "/s" }
func microsText(v float64) string { return report.FormatValue(v, report.Micros) }

func number(name, what string, v float64) Line { return Line{Name: name, What: what, Value: v} }

func sized(name, what string, v float64, format string, args ...any) Line {
	return Line{Name: name, What: what, Value: v, Unit: report.Bytes, Arithmetic: fmt.Sprintf(format, args...)}
}

func perSecond(l Line) Line {
	l.PerSecond = true
	return l
}

func cores(name, what string, v float64, format string, args ...any) Line {
	return Line{Name: name, What: what, Value: v, Arithmetic: fmt.Sprintf(format, args...)}
}

type conclusion struct {
	counted *count
	cost    *costs
	// nodes, apiServers and servers are numbers of those that the cluster has or would have.
	nodes, apiServers, servers int
	// bookmarkService, bookmarkSlice and heartbeat are sizes of messages, and cold is the size of
	// the state as Slicecast sends it, in bytes.
	bookmarkService, bookmarkSlice, heartbeat, cold int
	// events and updates are numbers of messages to a node during the watch, today and with
	// Slicecast.
	events, updates float64
}

func conclude(m *performance.Measured, counted *count, nodes, apiServers, servers int) (_ []Section, assumptions []string, err error) {
	c := &conclusion{
		counted: counted, nodes: nodes, apiServers: apiServers, servers: servers,
		events: float64(counted.services.events + counted.slices.events), updates: float64(counted.services.updates + counted.slices.updates),
	}
	if c.bookmarkService, c.bookmarkSlice, err = bookmarkBytes(); err != nil {
		return nil, nil, err
	}
	if c.heartbeat, err = heartbeatBytes(counted.store); err != nil {
		return nil, nil, err
	}
	if c.cold, err = coldBytes(counted.store); err != nil {
		return nil, nil, err
	}
	if c.cost, err = measuredCosts(m, float64(nodes)/float64(apiServers), float64(nodes)/float64(servers)); err != nil {
		return nil, nil, err
	}
	sections := []Section{c.numbers(), c.toNode(), c.fromServers(), c.cpu(), c.memory(), c.starts()}
	return sections, c.cost.assumptions(c.events, c.meanEvent(), servers), nil
}

func (c *conclusion) meanEvent() float64 {
	if c.events == 0 {
		return 0
	}
	return float64(c.counted.services.today+c.counted.slices.today) / c.events
}

func (c *conclusion) bookmark() float64 {
	return float64(c.bookmarkService+c.bookmarkSlice) / watches
}

// today and slicecast return the bytes to a node per second: all, those of events or updates, and
// those of bookmarks or heartbeats.
func (c *conclusion) today() (all, events, bookmarks float64) {
	events = float64(c.counted.services.today+c.counted.slices.today) / c.counted.seconds
	bookmarks = watches * c.bookmark() / bookmarkInterval.Seconds()
	return events + bookmarks, events, bookmarks
}

func (c *conclusion) slicecast() (all, updates, heartbeats float64) {
	updates = float64(c.counted.services.slicecast+c.counted.slices.slicecast) / c.counted.seconds
	heartbeats = float64(c.heartbeat) / fanout.DefaultHeartbeat.Seconds()
	return updates + heartbeats, updates, heartbeats
}

func (c *conclusion) numbers() Section {
	objects := &c.counted.objects
	return Section{"Objects and events", []Line{
		number("nodes", "nodes", float64(c.nodes)), number("api-servers", "API servers", float64(c.apiServers)),
		number("servers", "Slicecast servers", float64(c.servers)),
		number("services", "Services that nodes receive", float64(objects.services)),
		number("slices", "EndpointSlices that nodes receive", float64(objects.slices)),
		number("endpoints", "endpoints in them", float64(objects.endpoints)),
		{Name: "seconds", What: "time of the watch", Value: c.counted.seconds, Unit: report.Seconds},
		number("service-events", "events of Services", float64(c.counted.services.events)),
		number("slice-events", "events of EndpointSlices", float64(c.counted.slices.events)),
		{Name: "updates", What: "updates with Slicecast", Value: c.updates, Arithmetic: "one update for each event that changes what nodes need"},
	}}
}

func (c *conclusion) toNode() Section {
	today, events, bookmarks := c.today()
	slicecast, updates, heartbeats := c.slicecast()
	services, slices, seconds := &c.counted.services, &c.counted.slices, c.counted.seconds
	return Section{"To each node, continuously", []Line{
		perSecond(sized("node-bytes-today", "today", today, "(%s of Services + %s of EndpointSlices) / %.0f s = "+
			"%s; bookmarks of %d watches (%d B + %d B) / %.0f s = %s",
			sizeText(float64(services.today)), sizeText(float64(slices.today)), seconds, rateText(events), watches, c.bookmarkService, c.bookmarkSlice,
			bookmarkInterval.Seconds(), rateText(bookmarks))),
		perSecond(sized("node-bytes-slicecast", "with Slicecast", slicecast, "(%s of Services + %s of "+
			"EndpointSlices) / %.0f s = %s; heartbeats %d B / %.0f s = %s",
			sizeText(float64(services.slicecast)), sizeText(float64(slices.slicecast)), seconds, rateText(updates), c.heartbeat,
			fanout.DefaultHeartbeat.Seconds(), rateText(heartbeats))),
	}}
}

func (c *conclusion) fromServers() Section {
	n, a, s := float64(c.nodes), float64(c.apiServers), float64(c.servers)
	today, _, _ := c.today()
	slicecast, _, _ := c.slicecast()
	return Section{"From all servers together, continuously", []Line{
		perSecond(sized("all-bytes-today", "API servers today", n*today, "%s × %d nodes", rateText(today), c.nodes)),
		perSecond(sized("api-server-bytes-today", "… each", n*today/a, "%s / %d API servers", rateText(n*today), c.apiServers)),
		perSecond(sized("all-bytes-slicecast", "Slicecast's servers", n*slicecast, "%s × %d nodes", rateText(slicecast), c.nodes)),
		perSecond(sized("server-bytes-slicecast", "… each", n*slicecast/s, "%s / %d servers", rateText(n*slicecast), c.servers)),
		perSecond(sized("all-bytes-api-server-slicecast", "API servers with Slicecast", s*today,
			"%s × %d watching Slicecast servers", rateText(today), c.servers)),
	}}
}

func (c *conclusion) cpu() Section {
	n, a, s, seconds := float64(c.nodes), float64(c.apiServers), float64(c.servers), c.counted.seconds
	cost, minute, heartbeat := c.cost, bookmarkInterval.Seconds(), fanout.DefaultHeartbeat.Seconds()
	event, bookmark := cost.eventMicros(c.meanEvent()), cost.eventMicros(c.bookmark())
	watcher := (c.events/seconds*event + watches/minute*bookmark) * perMicro
	ofWatcher := fmt.Sprintf("(%.0f events / %.0f s × %s per event + %d bookmarks / %.0f s × %s)", c.events, seconds, microsText(event), watches,
		minute, microsText(bookmark))
	writes := c.events / seconds * cost.write.value * perMicro
	ofWrites := fmt.Sprintf("%.0f writes / %.0f s × %s", c.events, seconds, microsText(cost.write.value))
	messages := c.updates/seconds + 1/heartbeat
	ofMessages := fmt.Sprintf("(%.0f updates / %.0f s + 1 heartbeat / %.0f s)", c.updates, seconds, heartbeat)
	watching := (c.events/seconds + watches/minute) * cost.nodeEvent.value * perMicro
	ofWatching := fmt.Sprintf("(%.0f events / %.0f s + %d bookmarks / %.0f s) × %s",
		c.events, seconds, watches, minute, microsText(cost.nodeEvent.value))
	return Section{"CPU, continuously, in cores of the machine that was measured", []Line{
		cores("all-cores-today", "API servers today", writes+n*watcher, "%s + %s × %d nodes", ofWrites, ofWatcher, c.nodes),
		cores("api-server-cores-today", "… each", (writes+n*watcher)/a, "%.3g / %d API servers", writes+n*watcher, c.apiServers),
		cores("write-cores", "… of which writes, today and with Slicecast", writes, "%s", ofWrites),
		cores("all-cores-slicecast", "Slicecast's servers", n*messages*cost.update.value*perMicro+s*watching, "%s × %s × %d nodes + %s × %d servers", ofMessages,
			microsText(cost.update.value), c.nodes, ofWatching, c.servers),
		cores("watch-cores-slicecast", "… of which receiving from API servers", s*watching, "%s × %d servers", ofWatching, c.servers),
		cores("all-cores-api-server-slicecast", "API servers with Slicecast", writes+s*watcher,
			"%s + %s × %d servers", ofWrites, ofWatcher, c.servers),
		cores("node-cores-today", "each node today", watching, "%s", ofWatching),
		cores("node-cores-slicecast", "each node with Slicecast", messages*cost.nodeUpdate.value*perMicro, "%s × %s", ofMessages, microsText(cost.nodeUpdate.value)),
	}}
}

func (c *conclusion) memory() Section {
	objects, ram := &c.counted.objects, c.cost.ram.value
	empty, endpoint, service := c.cost.stateBytes()
	return Section{"Memory", []Line{
		sized("node-memory-today", "the objects on each node, today",
			float64(c.counted.memory.today), "heap of the objects, decoded as client-go does"),
		sized("node-memory-slicecast", "… with Slicecast", float64(c.counted.memory.slicecast), "heap of the objects, decoded as an agent does"),
		sized("server-memory-slicecast", "RAM of each Slicecast server",
			empty+float64(objects.endpoints)*endpoint+float64(objects.services)*service+float64(c.nodes)/float64(c.servers)*ram,
			"%s without objects and nodes + %d endpoints × %s + %d Services × %s + %d nodes / %d servers × %s",
			sizeText(empty), objects.endpoints, sizeText(endpoint), objects.services, sizeText(service), c.nodes, c.servers, sizeText(ram)),
	}}
}

func (c *conclusion) starts() Section {
	n, today, slicecast := float64(c.nodes), float64(c.counted.cold), float64(c.cold)
	return Section{"When one node or all nodes start", []Line{
		sized("cold-bytes-today", "today, up to Kubernetes 1.36", today, "each object once, as the initial events of its watch"),
		sized("cold-list-bytes-today", "today, from 1.37 on, or with lists",
			float64(c.counted.lists.bytes), "each object once, compressed together with gzip"),
		sized("cold-bytes-slicecast", "with Slicecast", slicecast, "each shard once, compressed"),
		sized("all-cold-bytes-today", "all nodes today", n*today, "%s × %d nodes", sizeText(today), c.nodes),
		sized("all-cold-bytes-slicecast", "all nodes with Slicecast", n*slicecast, "%s × %d nodes", sizeText(slicecast), c.nodes),
	}}
}

// assumptions returns what does not follow from the cluster's data, given the number of events and
// their mean size.
func (c *costs) assumptions(events, mean float64, servers int) []string {
	out := []string{
		"Bytes are those that TLS passes to TCP: messages with their frames and records. The acks in the other direction are not in the figures.",
		"Today each node has a kube-proxy that watches Services and EndpointSlices with kube-proxy's selectors, in " +
			"protobuf. Other watchers (CoreDNS, ingress " +
			"controllers) cost the same with Slicecast and are not in the figures.",
		fmt.Sprintf("Node objects are not in the figures. Today each kube-proxy watches its own Node. With "+
			"Slicecast, each server watches all Nodes and sends an agent "+
			"what it needs of its own Node. An event of a Node is sent once today; with Slicecast, it is sent %d "+
			"times to the servers and at most once to the agent.", servers),
		"A current kube-proxy streams its lists, as the initial events of watches. From Kubernetes 1.37 on, an API " +
			"server compresses these watches until they end after 5 to " +
			"10 minutes. The watches that follow are not compressed; the continuous figures are for those. An " +
			"older kube-proxy, or one whose API server does not " +
			"stream, fetches lists; the API server compresses lists of more than 128 KiB.",
		"Slicecast's servers join changes that happen at almost the same time. The figures do not take this into account, so a server may send less.",
	}
	text := c.eventText()
	if events > 0 {
		text += fmt.Sprintf(" The mean size of an event here is %s.", sizeText(mean))
	}
	out = append(out, text, fmt.Sprintf("CPU of Slicecast's servers: %s for an update to a node, and as much for a "+
		"heartbeat. Source: %s. The servers of that report generate "+
		"their state. The cost of receiving, decrypting and decoding an event from an API server is assumed to be "+
		"that of a node today, %s for an event of %s. "+
		"The figures include it. Source: %s.",
		microsText(c.update.value), c.update.source, microsText(c.nodeEvent.value), sizeText(c.nodeEvent.bytes), c.nodeEvent.source))
	out = append(out,
		fmt.Sprintf("CPU of nodes covers receiving, decrypting and decoding. It includes the load tester's own "+
			"costs, but neither garbage collection nor "+
			"programming the kernel. Today: %s for an event of %s. Source: %s. With Slicecast: %s for an update. Source: %s.",
			microsText(c.nodeEvent.value), sizeText(c.nodeEvent.bytes), c.nodeEvent.source, microsText(c.nodeUpdate.value), c.nodeUpdate.source),
		"Memory of nodes is that of the objects alone, without what programs derive from them. Memory of API servers is not in the figures.",
		c.memoryText())
	return append(out, c.notes()...)
}
