package main

// mutation is a bug that is put into the tree.
type mutation struct {
	name string
	// file is changed: old, which it has exactly once, becomes new.
	file, old, new string
	// tests are the packages whose tests are run after the simulation, if that does not catch it.
	tests []string
}

// mutations are the seeded bugs. Each one is a mistake that somebody could make, and that would
// lose an endpoint, make one late, or report what is not so.
var mutations = []mutation{
	// The reconciler.
	{
		"an ack is sent before the kernel has changed", "agent/reconcile/reconcile.go",
		"\treplaced, failed := r.program(ctx, changes)\n",
		"\tr.Reporter.Ack(r.epoch, maps.Clone(r.unacked))\n\treplaced, failed := r.program(ctx, changes)\n",
		[]string{"./agent/reconcile"},
	},
	{
		"positions are acknowledged although an IP family has failed", "agent/reconcile/reconcile.go",
		"\t\t\tdelete(acked, key.Shard(shards))\n", "\t\t\t_ = key\n",
		[]string{"./agent/reconcile"},
	},
	{
		"positions of an earlier epoch are acknowledged", "agent/reconcile/reconcile.go",
		"\t\tclear(r.unacked)\n", "",
		[]string{"./agent/reconcile", "./internal/fabric"},
	},
	{
		"a change of the Node is not programmed", "agent/reconcile/reconcile.go",
		"\tr.schedule.replace = r.schedule.replace || node\n", "\t_ = node\n",
		[]string{"./agent/reconcile"},
	},
	{
		"Service ports that failed are not tried again", "agent/reconcile/reconcile.go",
		"\t\tif !f.Lasting {\n\t\t\treturn true\n", "\t\tif !f.Lasting {\n\t\t\treturn false\n",
		[]string{"./agent/reconcile"},
	},
	{
		"rules that others removed are not repaired", "agent/reconcile/reconcile.go",
		"\t\t\tif r.schedule.repair() {\n", "\t\t\tif false {\n",
		[]string{"./agent/reconcile"},
	},
	{
		"a failed Apply is taken for a success", "agent/reconcile/reconcile.go",
		"\t\tif len(out) == 0 {\n\t\t\tfor _, c := range changes {\n", "\t\tif len(out) >= 0 {\n\t\t\tfor _, c := range changes {\n",
		[]string{"./agent/reconcile"},
	},
	// The client's cache.
	{
		"a changed slice is not reported to the reader", "agent/client/cache/apply.go",
		"\t\tw.pending.services[old.ServiceKey()] = struct{}{}\n\t}\n\tw.pending.services[slice.ServiceKey()] = struct{}{}\n",
		"\t\tw.pending.services[old.ServiceKey()] = struct{}{}\n\t}\n",
		[]string{"./agent/client/cache"},
	},
	{
		"a removed object is not reported to the reader", "agent/client/cache/apply.go",
		"\t\t\tw.pending.services[o.ServiceKey()] = struct{}{}\n\t\t\tw.countLocked(key)\n",
		"\t\t\tw.countLocked(key)\n",
		[]string{"./agent/client/cache"},
	},
	{
		"objects that a whole shard does not name stay", "agent/client/cache/shard.go",
		"\t\tif _, ok := named[key]; !ok && (u.Full || buckets[key.Bucket()]) {\n",
		"\t\tif _, ok := named[key]; !ok && buckets[key.Bucket()] {\n",
		[]string{"./agent/client/cache"},
	},
	{
		"objects that a whole bucket does not name stay", "agent/client/cache/shard.go",
		"\t\tif _, ok := named[key]; !ok && (u.Full || buckets[key.Bucket()]) {\n",
		"\t\tif _, ok := named[key]; !ok && u.Full {\n",
		[]string{"./agent/client/cache"},
	},
	{
		"the cache's digest does not change with a slice", "agent/client/cache/shard.go",
		"\told = s.slices[key]\n\ts.arrived(key)\n", "\told = s.slices[key]\n\ts.arrived(key)\n\ts.revision--\n",
		[]string{"./agent/client/cache", "./agent/client/checkpoint"},
	},
	{
		"a position is not checked against an update's range", "agent/client/cache/apply.go",
		"(s.sequence < u.From || s.sequence > u.To)", "s.sequence > u.To",
		[]string{"./agent/client/cache", "./agent/client"},
	},
	{
		"a lock is missed when changes are taken", "agent/client/cache/cache.go",
		"\tc.mu.Lock()\n\tdefer c.mu.Unlock()\n\tif !c.countsLocked() {\n",
		"\tif !c.countsLocked() {\n",
		[]string{"./agent/client/cache", "./agent/client"},
	},
	{
		"an agent that starts programs what it has before a server has brought it in sync", "agent/client/cache/cache.go",
		"\treturn &Cache{pending: pending{", "\treturn &Cache{inSync: true, pending: pending{",
		[]string{"./agent/client/cache"},
	},
	{
		"Services with UDP ports are not reported to the reader from a checkpoint", "agent/client/cache/contents.go",
		"\t\t\tc.pending.services[key] = struct{}{}\n",
		"\t\t\tif held.service == nil || !slices.ContainsFunc(held.service.Ports, isUDP) {\n" +
			"\t\t\t\tc.pending.services[key] = struct{}{}\n\t\t\t}\n",
		[]string{"./agent/client/cache"},
	},
	{
		"positions of a checkpoint that nobody has confirmed are acknowledged", "agent/client/cache/cache.go",
		"\t\tif !c.inSync || len(s.missing) > 0 {\n", "\t\tif len(s.missing) > 0 {\n",
		[]string{"./agent/client/cache", "./agent/client/checkpoint"},
	},
	{
		"resource versions are not remembered from updates", "agent/client/cache/apply.go",
		"\tw.seen = w.seen.Max(u.ResourceVersions)\n", "",
		[]string{"./agent/client/cache", "./agent/client", "./internal/fabric"},
	},
	{
		"no checkpoint is of another cluster", "agent/client/cache/cache.go",
		"clusterLocked() int64 {\n\tif len(c.shards) == 0 {\n", "clusterLocked() int64 {\n\tif len(c.shards) >= 0 {\n",
		[]string{"./agent/client/cache", "./agent/client", "./internal/fabric"},
	},
	// The checkpoint and the stream.
	{
		"what a server claims counts on later streams", "agent/client/cache/writer.go",
		"\t\tif s := &w.shards[i]; s.unproved() {\n", "\t\tif s := &w.shards[i]; len(s.missing) > 0 {\n",
		[]string{"./agent/client/cache", "./agent/client"},
	},
	{
		"a checkpoint of another node is accepted", "agent/client/checkpoint/format.go",
		"\tcase h.GetNodeName() != node:\n", "\tcase h.GetNodeName() == \"\":\n",
		[]string{"./agent/client/checkpoint"},
	},
	{
		"a checkpoint is not synchronized before it is renamed", "agent/client/checkpoint/checkpoint.go",
		"\t\terr = f.Sync()\n", "\t\terr = nil\n",
		[]string{"./agent/client/checkpoint"},
	},
	{
		"a checkpoint is programmed although an agent that was killed may have programmed later rules", "agent/reconcile/reconcile.go",
		"\tr.kept = ok && r.Ahead && stale && ", "\tr.kept = ok && r.Ahead && !stale && ",
		[]string{"./agent/reconcile"},
	},
	{
		"a silent server is not left", "agent/client/connection/stream.go",
		"func() { s.cancel(errSilent) }", "func() {}",
		[]string{"./agent/client"},
	},
	{
		"diverged shards beyond a client's limit are forgotten", "agent/client/connection/digests.go",
		"\t\t\tc.state = model.Digest{} // invariant 3\n", "",
		[]string{"./agent/client/connection"},
	},
	{
		"nacks are not repeated on a new stream", "agent/client/connection/outbox.go",
		"\t\t\tcontinue\n\t\t}\n\t\to.tellLocked(s, f)\n", "\t\t\tcontinue\n\t\t}\n",
		[]string{"./agent/client/connection", "./agent/client"},
	},
	// The store.
	{
		"removals are not sent to clients that come back", "internal/store/shard.go",
		"\t\t\tu.Removed = append(u.Removed, e.key)\n\t\t}\n\t\treturn true\n", "\t\t}\n\t\treturn true\n",
		[]string{"./internal/store"},
	},
	{
		"a forgotten tombstone is still believed to be known", "internal/store/shard.go",
		"\t\t\tnext.floor = max(next.floor, t.sequence)\n", "",
		[]string{"./internal/store"},
	},
	{
		"tombstones are not forgotten", "internal/store/shard.go",
		"\tfor len(s.tombstones) > s.maxTombstones {\n", "\tfor len(s.tombstones) > 1<<20 {\n",
		[]string{"./internal/store"},
	},
	{
		"a shard's digest is not updated", "internal/store/shard.go",
		"\tnext.digests = &digests{}\n", "",
		[]string{"./internal/store"},
	},
	{
		"a relist does not remove what is gone", "internal/store/store.go",
		"\t\tif _, ok := keep[key]; !ok {\n", "\t\tif _, ok := keep[key]; false && !ok {\n",
		[]string{"./internal/store"},
	},
	{
		"a slice that changes its Service stays in the old shard", "internal/store/store.go",
		"\t\ts.pendLocked(old, key, nil) // a slice that now belongs to another Service\n", "\t\t_ = old\n",
		[]string{"./internal/store"},
	},
	{
		"state is published before the source has synced", "internal/store/store.go",
		"\tif !closed(s.synced) {\n\t\treturn Publication{}\n", "\tif false {\n\t\treturn Publication{}\n",
		[]string{"./internal/store"},
	},
	// The source.
	{
		"an old list is accepted at once", "internal/source/kube/store.go",
		"\tif rv < r.highest {\n", "\tif false {\n",
		[]string{"./internal/source/kube"},
	},
	{
		"an old list is believed if the same connection repeats it", "internal/source/kube/resource.go",
		"\t\tlist, err := r.other.List", "\t\tlist, err := r.server.List",
		[]string{"./internal/source/kube"},
	},
	{
		"a streamed list is waited for however long it takes", "internal/source/kube/contact.go",
		"= 10 * time.Second, 2 * time.Minute", "= 10 * time.Hour, 20 * time.Hour",
		[]string{"./internal/source/kube"},
	},
	{
		"bookmarks that repeat a resourceVersion count as news", "internal/source/kube/store.go",
		"\tif rv > r.highest {", "\tif rv >= r.highest {",
		[]string{"./internal/source/kube"},
	},
	{
		"a watch is resumed at a version that the API server has not reached", "internal/source/kube/resource.go",
		"\tif have == 0 || have >= want {\n", "\tif true {\n",
		[]string{"./internal/source/kube"},
	},
	// The fan-out.
	{
		"a client that has seen newer state is served at once", "server/fanout/start.go",
		"\t\tdone := reached.Max(seen) == reached\n", "\t\tdone := true\n",
		[]string{"./server/fanout", "./internal/fabric"},
	},
	{
		"a client that is ahead of its server is said to have seen what the server has", "server/fanout/start.go",
		"\t\theld = state.content()\n", "",
		[]string{"./server/fanout", "./internal/fabric"},
	},
	{
		"a frame that could not be sent counts as sent", "server/fanout/fan.go",
		"\t\t\ts.retreat(b.updates)\n", "\t\t\ts.next = b.to\n",
		[]string{"./server/fanout"},
	},
	{
		"a stream that the ring has lapped is not caught up", "server/fanout/session.go",
		"\t\ts.hub.metrics.lapped.Inc()\n\t\treturn s.catchUp()\n", "\t\ts.hub.metrics.lapped.Inc()\n\t\treturn nil\n",
		[]string{"./server/fanout"},
	},
	{
		"the time of a node's ack is halved", "server/fanout/convergence.go",
		"\tt := max(at.Sub(p.published), 1) // 0 would mean not yet\n", "\tt := max(at.Sub(p.published)/2, 1)\n",
		[]string{"./server/fanout"},
	},
	{
		"shares of nodes are rounded down", "server/fanout/convergence.go",
		"return (percent*nodes + 99) / 100", "return percent * nodes / 100",
		[]string{"./server/fanout"},
	},
	{
		"an update counts as complete while one node lacks it", "server/fanout/convergence.go",
		"\t\tif p.programmed < p.nodes {\n", "\t\tif p.programmed < max(1, p.nodes-1) {\n",
		[]string{"./server/fanout"},
	},
	{
		"a node that leaves is waited for", "server/fanout/session.go",
		"\tdefer s.reports.leave()\n", "",
		[]string{"./server/fanout"},
	},
	// Relays.
	{
		"a relay does not pass on removals", "server/relay/relay.go",
		"\t\tu.store.Remove(key, rv(key.Kind))\n", "\t\t_, _ = key, rv\n",
		[]string{"./server/relay"},
	},
	{
		"a relay acknowledges what its nodes do not have", "server/fanout/upstream.go",
		"\tfor len(s.open) > 0 && s.open[0].sequence <= c.sequence {\n", "\tfor len(s.open) > 0 {\n",
		[]string{"./server/fanout", "./server/relay"},
	},
	{
		"what a server has claimed to have seen stays with a relay", "server/relay/relay.go",
		"Seen: s.SetSeen,", "Seen: func(model.ResourceVersions) {},",
		[]string{"./server/relay"},
	},
	// The transport.
	{
		"bytes that the socket did not accept are lost", "server/h2/socket.go",
		"\ts.pending = append(s.pending, b[n:]...)\n", "\ts.pending = append(s.pending, b[min(n+1, len(b)):]...)\n",
		[]string{"./server/h2"},
	},
	// The view.
	{
		"a node's changed zone leaves Services as they are", "agent/view/view.go",
		"\t\ts.seen = nil\n\t\tv.touch(s)\n", "\t\ts.seen = nil\n",
		[]string{"./agent/view"},
	},
}
