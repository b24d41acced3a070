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

// cores returns a line with the number of CPU cores that something uses.
func cores(name, what string, v float64, format string, args ...any) Line {
	return Line{Name: name, What: what, Value: v, Arithmetic: fmt.Sprintf(format, args...)}
}

// conclude computes all figures and assumptions from what was counted and measured.
func conclude(m *performance.Measured, c *count, nodes, apiServers, servers int) ([]Section, []string, error) {
	bookmarkService, bookmarkSlice, err := bookmarkBytes()
	if err != nil {
		return nil, nil, err
	}
	heartbeat, err := heartbeatBytes(c.store)
	if err != nil {
		return nil, nil, err
	}
	cold, err := coldBytes(c.store)
	if err != nil {
		return nil, nil, err
	}
	seconds := c.seconds
	events := float64(c.services.events + c.slices.events)
	today := float64(c.services.today + c.slices.today)
	with := float64(c.services.slicecast + c.slices.slicecast)
	updates := float64(c.services.updates + c.slices.updates)
	n, a, s := float64(nodes), float64(apiServers), float64(servers)
	cost, err := measuredCosts(m, n/a, n/s)
	if err != nil {
		return nil, nil, err
	}
	bookmark := float64(bookmarkService+bookmarkSlice) / watches
	toNode := today/seconds + watches*bookmark/bookmarkInterval.Seconds()
	toNodeWith := with/seconds + float64(heartbeat)/fanout.DefaultHeartbeat.Seconds()

	var sections []Section
	add := func(title string, lines ...Line) { sections = append(sections, Section{title, lines}) }
	add("Objects and events",
		number("nodes", "nodes", n), number("api-servers", "API servers", a), number("servers", "Slicecast servers", s),
		number("services", "Services that nodes receive", float64(c.objects.services)),
		number("slices", "EndpointSlices that nodes receive", float64(c.objects.slices)),
		number("endpoints", "endpoints in them", float64(c.objects.endpoints)),
		Line{Name: "seconds", What: "time of the watch", Value: seconds, Unit: report.Seconds},
		number("service-events", "events of Services", float64(c.services.events)),
		number("slice-events", "events of EndpointSlices", float64(c.slices.events)),
		Line{Name: "updates", What: "updates with Slicecast", Value: updates, Arithmetic: "one update for each event that changes what nodes need"},
	)
	add("To each node, continuously",
		perSecond(sized("node-bytes-today", "today", toNode, "(%s of Services + %s of EndpointSlices) / %.0f s = %s; bookmarks of %d watches (%d B + %d B) / %.0f s = %s",
			sizeText(float64(c.services.today)), sizeText(float64(c.slices.today)), seconds, rateText(today/seconds), watches, bookmarkService, bookmarkSlice,
			bookmarkInterval.Seconds(), rateText(watches*bookmark/bookmarkInterval.Seconds()))),
		perSecond(sized("node-bytes-slicecast", "with Slicecast", toNodeWith, "(%s of Services + %s of EndpointSlices) / %.0f s = %s; heartbeats %d B / %.0f s = %s",
			sizeText(float64(c.services.slicecast)), sizeText(float64(c.slices.slicecast)), seconds, rateText(with/seconds), heartbeat,
			fanout.DefaultHeartbeat.Seconds(), rateText(float64(heartbeat)/fanout.DefaultHeartbeat.Seconds()))),
	)
	add("From all servers together, continuously",
		perSecond(sized("all-bytes-today", "API servers today", n*toNode, "%s × %d nodes", rateText(toNode), nodes)),
		perSecond(sized("api-server-bytes-today", "… each", n*toNode/a, "%s / %d API servers", rateText(n*toNode), apiServers)),
		perSecond(sized("all-bytes-slicecast", "Slicecast's servers", n*toNodeWith, "%s × %d nodes", rateText(toNodeWith), nodes)),
		perSecond(sized("server-bytes-slicecast", "… each", n*toNodeWith/s, "%s / %d servers", rateText(n*toNodeWith), servers)),
		perSecond(sized("all-bytes-api-server-slicecast", "API servers with Slicecast", s*toNode, "%s × %d watching Slicecast servers", rateText(toNode), servers)),
	)

	mean := 0.
	if events > 0 {
		mean = today / events
	}
	eventMicros, bookmarkMicros := cost.eventMicros(mean), cost.eventMicros(bookmark)
	watcher := (events/seconds*eventMicros + watches/bookmarkInterval.Seconds()*bookmarkMicros) * perMicro
	ofWatcher := fmt.Sprintf("(%.0f events / %.0f s × %s per event + %d bookmarks / %.0f s × %s)", events, seconds, microsText(eventMicros), watches,
		bookmarkInterval.Seconds(), microsText(bookmarkMicros))
	writes := events / seconds * cost.write.value * perMicro
	ofWrites := fmt.Sprintf("%.0f writes / %.0f s × %s", events, seconds, microsText(cost.write.value))
	messages := updates/seconds + 1/fanout.DefaultHeartbeat.Seconds()
	ofMessages := fmt.Sprintf("(%.0f updates / %.0f s + 1 heartbeat / %.0f s)", updates, seconds, fanout.DefaultHeartbeat.Seconds())
	watching := (events/seconds + watches/bookmarkInterval.Seconds()) * cost.nodeEvent.value * perMicro
	ofWatching := fmt.Sprintf("(%.0f events / %.0f s + %d bookmarks / %.0f s) × %s", events, seconds, watches, bookmarkInterval.Seconds(),
		microsText(cost.nodeEvent.value))
	add("CPU, continuously, in cores of the machine that was measured",
		cores("all-cores-today", "API servers today", writes+n*watcher, "%s + %s × %d nodes", ofWrites, ofWatcher, nodes),
		cores("api-server-cores-today", "… each", (writes+n*watcher)/a, "%.3g / %d API servers", writes+n*watcher, apiServers),
		cores("write-cores", "… of which writes, today and with Slicecast", writes, "%s", ofWrites),
		cores("all-cores-slicecast", "Slicecast's servers", n*messages*cost.update.value*perMicro+s*watching, "%s × %s × %d nodes + %s × %d servers", ofMessages,
			microsText(cost.update.value), nodes, ofWatching, servers),
		cores("watch-cores-slicecast", "… of which receiving from API servers", s*watching, "%s × %d servers", ofWatching, servers),
		cores("all-cores-api-server-slicecast", "API servers with Slicecast", writes+s*watcher, "%s + %s × %d servers", ofWrites, ofWatcher, servers),
		cores("node-cores-today", "each node today", watching, "%s", ofWatching),
		cores("node-cores-slicecast", "each node with Slicecast", messages*cost.nodeUpdate.value*perMicro, "%s × %s", ofMessages,
			microsText(cost.nodeUpdate.value)),
	)
	emptyState, endpoint, service := cost.stateBytes()
	add("Memory",
		sized("node-memory-today", "the objects on each node, today", float64(c.memory.today), "heap of the objects, decoded as client-go does"),
		sized("node-memory-slicecast", "… with Slicecast", float64(c.memory.slicecast), "heap of the objects, decoded as an agent does"),
		sized("server-memory-slicecast", "RAM of each Slicecast server",
			emptyState+float64(c.objects.endpoints)*endpoint+float64(c.objects.services)*service+n/s*cost.ram.value,
			"%s without objects and nodes + %d endpoints × %s + %d Services × %s + %d nodes / %d servers × %s",
			sizeText(emptyState), c.objects.endpoints, sizeText(endpoint), c.objects.services, sizeText(service), nodes, servers, sizeText(cost.ram.value)),
	)
	add("When one node or all nodes start",
		sized("cold-bytes-today", "today, up to Kubernetes 1.36", float64(c.cold), "each object once, as the initial events of its watch"),
		sized("cold-list-bytes-today", "today, from 1.37 on, or with lists", float64(c.lists.bytes), "each object once, compressed together with gzip"),
		sized("cold-bytes-slicecast", "with Slicecast", float64(cold), "each shard once, compressed"),
		sized("all-cold-bytes-today", "all nodes today", n*float64(c.cold), "%s × %d nodes", sizeText(float64(c.cold)), nodes),
		sized("all-cold-bytes-slicecast", "all nodes with Slicecast", n*float64(cold), "%s × %d nodes", sizeText(float64(cold)), nodes),
	)
	return sections, cost.assumptions(events, mean, servers), nil
}

// assumptions returns what does not follow from the cluster's data, given the number of events and
// their mean size.
func (c *costs) assumptions(events, mean float64, servers int) []string {
	out := []string{
		"Bytes are those that TLS passes to TCP: messages with their frames and records. The acks in the other direction are not in the figures.",
		"Today each node has a kube-proxy that watches Services and EndpointSlices with kube-proxy's selectors, in protobuf. Other watchers (CoreDNS, ingress " +
			"controllers) cost the same with Slicecast and are not in the figures.",
		fmt.Sprintf("Node objects are not in the figures. Today each kube-proxy watches its own Node. With Slicecast, each server watches all Nodes and sends an agent "+
			"what it needs of its own Node. An event of a Node is sent once today; with Slicecast, it is sent %d times to the servers and at most once to the agent.", servers),
		"A current kube-proxy streams its lists, as the initial events of watches. From Kubernetes 1.37 on, an API server compresses these watches until they end after 5 to " +
			"10 minutes. The watches that follow are not compressed; the continuous figures are for those. An older kube-proxy, or one whose API server does not " +
			"stream, fetches lists; the API server compresses lists of more than 128 KiB.",
		"Slicecast's servers join changes that happen at almost the same time. The figures do not take this into account, so a server may send less.",
	}
	text := c.eventText()
	if events > 0 {
		text += fmt.Sprintf(" The mean size of an event here is %s.", sizeText(mean))
	}
	out = append(out, text, fmt.Sprintf("CPU of Slicecast's servers: %s for an update to a node, and as much for a heartbeat. Source: %s. The servers of that report generate "+
		"their state. The cost of receiving, decrypting and decoding an event from an API server is assumed to be that of a node today, %s for an event of %s. "+
		"The figures include it. Source: %s.",
		microsText(c.update.value), c.update.source, microsText(c.nodeEvent.value), sizeText(c.nodeEvent.bytes), c.nodeEvent.source))
	out = append(out,
		fmt.Sprintf("CPU of nodes covers receiving, decrypting and decoding. It includes the load tester's own costs, but neither garbage collection nor "+
			"programming the kernel. Today: %s for an event of %s. Source: %s. With Slicecast: %s for an update. Source: %s.",
			microsText(c.nodeEvent.value), sizeText(c.nodeEvent.bytes), c.nodeEvent.source, microsText(c.nodeUpdate.value), c.nodeUpdate.source),
		"Memory of nodes is that of the objects alone, without what programs derive from them. Memory of API servers is not in the figures.",
		c.memoryText())
	return append(out, c.notes()...)
}
