package main

import "fmt"

// The types below are the parts of Grafana's dashboards that Slicecast's use, as the JSON model of
// schema version 39 (Grafana 11) has them.

type dashboard struct {
	UID           string   `json:"uid"`
	Title         string   `json:"title"`
	Description   string   `json:"description"`
	Tags          []string `json:"tags"`
	SchemaVersion int      `json:"schemaVersion"`
	Editable      bool     `json:"editable"`
	Refresh       string   `json:"refresh"`
	Time          span     `json:"time"`
	Templating    struct {
		List []variable `json:"list"`
	} `json:"templating"`
	Links  []link  `json:"links"`
	Panels []panel `json:"panels"`
}

type span struct {
	From string `json:"from"`
	To   string `json:"to"`
}

// link leads to the other dashboards with a tag.
type link struct {
	Title       string   `json:"title"`
	Type        string   `json:"type"`
	Tags        []string `json:"tags"`
	AsDropdown  bool     `json:"asDropdown"`
	IncludeVars bool     `json:"includeVars"`
	KeepTime    bool     `json:"keepTime"`
}

type variable struct {
	Name       string      `json:"name"`
	Label      string      `json:"label"`
	Type       string      `json:"type"`
	Query      string      `json:"query"`
	Datasource *datasource `json:"datasource,omitempty"`
	Refresh    int         `json:"refresh,omitempty"` // 2 is on each change of the time range
	Sort       int         `json:"sort,omitempty"`    // 1 is alphabetical
	IncludeAll bool        `json:"includeAll,omitempty"`
	Multi      bool        `json:"multi,omitempty"`
	AllValue   string      `json:"allValue,omitempty"`
	Current    *current    `json:"current,omitempty"`
}

type current struct {
	Text  string `json:"text"`
	Value string `json:"value"`
}

type datasource struct {
	Type string `json:"type"`
	UID  string `json:"uid"`
}

type panel struct {
	ID          int         `json:"id"`
	Title       string      `json:"title"`
	Description string      `json:"description"`
	Type        string      `json:"type"`
	Datasource  datasource  `json:"datasource"`
	GridPos     gridPos     `json:"gridPos"`
	FieldConfig fieldConfig `json:"fieldConfig"`
	Options     options     `json:"options"`
	Targets     []target    `json:"targets"`
}

type gridPos struct {
	H int `json:"h"`
	W int `json:"w"`
	X int `json:"x"`
	Y int `json:"y"`
}

type fieldConfig struct {
	Defaults struct {
		Unit string `json:"unit"`
		Min  int    `json:"min"`
	} `json:"defaults"`
	Overrides []struct{} `json:"overrides"`
}

type options struct {
	Legend  *legend  `json:"legend,omitempty"`
	Tooltip *tooltip `json:"tooltip,omitempty"`
}

type legend struct {
	DisplayMode string   `json:"displayMode"`
	Placement   string   `json:"placement"`
	ShowLegend  bool     `json:"showLegend"`
	Calcs       []string `json:"calcs"`
}

type tooltip struct {
	Mode string `json:"mode"`
	Sort string `json:"sort"`
}

type target struct {
	RefID        string     `json:"refId"`
	Datasource   datasource `json:"datasource"`
	Expr         string     `json:"expr"`
	LegendFormat string     `json:"legendFormat"`
	Instant      bool       `json:"instant"`
	Range        bool       `json:"range"`
}

// prometheus is the data source that a dashboard's variable chooses.
var prometheus = datasource{Type: "prometheus", UID: "${datasource}"}

// query is an expression with the legend of its curves.
type query struct{ expr, legend string }

const (
	statWidth, chartWidth   = 4, 12
	statHeight, chartHeight = 4, 8
	width                   = 24 // of a dashboard
)

// newDashboard returns a dashboard whose variable instance has the instances that a metric is from.
func newDashboard(uid, title, description, metric string) *dashboard {
	d := &dashboard{
		UID: uid, Title: title, Description: description, Tags: []string{"slicecast"}, SchemaVersion: 39, Refresh: "30s",
		Time:  span{"now-1h", "now"},
		Links: []link{{Title: "Slicecast", Type: "dashboards", Tags: []string{"slicecast"}, AsDropdown: true, KeepTime: true}},
	}
	d.Templating.List = []variable{
		{Name: "datasource", Label: "Data source", Type: "datasource", Query: "prometheus"},
		{
			Name: "instance", Label: "Instance", Type: "query", Query: fmt.Sprintf("label_values(%s, instance)", metric),
			Datasource: &prometheus, Refresh: 2, Sort: 1, IncludeAll: true, Multi: true, AllValue: ".+",
			Current: &current{Text: "All", Value: "$__all"},
		},
	}
	return d
}

// add places a panel to the right of the last one, or in the next row if there is no room.
func (d *dashboard) add(kind, title, description, unit string, w, h int, queries []query) *panel {
	p := panel{
		ID: len(d.Panels) + 1, Title: title, Description: description, Type: kind, Datasource: prometheus,
		GridPos: gridPos{W: w, H: h},
	}
	if n := len(d.Panels); n > 0 {
		last := d.Panels[n-1].GridPos
		p.GridPos.X, p.GridPos.Y = last.X+last.W, last.Y
		if p.GridPos.X+w > width || last.H != h {
			p.GridPos.X, p.GridPos.Y = 0, last.Y+last.H
		}
	}
	p.FieldConfig.Defaults.Unit, p.FieldConfig.Overrides = unit, []struct{}{}
	for i, q := range queries {
		p.Targets = append(p.Targets, target{
			RefID: string(rune('A' + i)), Datasource: prometheus, Expr: q.expr, LegendFormat: q.legend,
			Instant: kind == "stat", Range: kind != "stat",
		})
	}
	d.Panels = append(d.Panels, p)
	return &d.Panels[len(d.Panels)-1]
}

// stat adds one number.
func (d *dashboard) stat(title, description, unit, expr string) {
	d.add("stat", title, description, unit, statWidth, statHeight, []query{{expr: expr}})
}

// chart adds curves over time.
func (d *dashboard) chart(title, description, unit string, queries ...query) {
	p := d.add("timeseries", title, description, unit, chartWidth, chartHeight, queries)
	p.Options = options{
		Legend:  &legend{DisplayMode: "list", Placement: "bottom", ShowLegend: true, Calcs: []string{}},
		Tooltip: &tooltip{Mode: "multi", Sort: "desc"},
	}
}

// process adds what every program has. metric is one that only programs of this kind have.
func (d *dashboard) process(metric string) {
	only := ` and on (instance) ` + metric + `{instance=~"$instance"}`
	d.chart("CPU", "Processors in use.", "short", query{`rate(process_cpu_seconds_total{instance=~"$instance"}[$__rate_interval])` + only, "{{instance}}"})
	d.chart("Memory", "Resident memory.", "bytes", query{`process_resident_memory_bytes{instance=~"$instance"}` + only, "{{instance}}"})
}

// rate returns an expression for the rate of a counter of the chosen instances, summed by labels.
func rate(by, metric string, matchers ...string) string {
	selector := `instance=~"$instance"`
	for _, m := range matchers {
		selector += "," + m
	}
	return fmt.Sprintf(`sum by (%s) (rate(%s{%s}[$__rate_interval]))`, by, metric, selector)
}

// quantile returns an expression for a quantile of a histogram of the chosen instances.
func quantile(q, by, metric string, matchers ...string) string {
	return fmt.Sprintf("histogram_quantile(%s, %s)", q, rate(by, metric+"_bucket", matchers...))
}

func dashboards() []*dashboard {
	return []*dashboard{convergence(), servers(), relays(), agents()}
}

// allNodes counts each node once. Servers count nodes behind relays, and so do the relays.
const allNodes = `sum(slicecast_server_nodes{instance=~"$instance"} unless on (instance) slicecast_upstream_connected)`

func convergence() *dashboard {
	const metric = "slicecast_server_convergence_duration_seconds"
	d := newDashboard("slicecast-convergence", "Slicecast / Convergence",
		"How soon the nodes' kernels hold what changes in the cluster.", "slicecast_server_nodes")
	d.stat("Within a second", "Share of the last hour's changes that 99 % of the nodes had within a second. The objective is 99 %.",
		"percentunit", "1 - ("+slowRatio("1h")+")")
	d.stat("Error budget used, 6 hours", "1 means that the changes of the last 6 hours used up exactly what the objective allows.",
		"percentunit", fmt.Sprintf("(%s) / %.4g", slowRatio("6h"), 1-objective))
	d.stat("Nodes", "Nodes that the chosen servers serve, also through relays.", "short", allNodes)
	d.stat("Changes", "Published updates, one for each changed shard.", "cps",
		`sum(rate(slicecast_server_updates_total{instance=~"$instance"}[$__rate_interval]))`)
	d.stat("Slowest change", "Upper bound of the time in which all nodes had the slowest change of the last hour.", "s",
		`max(histogram_quantile(1, sum by (instance, le) (rate(`+metric+`_bucket{instance=~"$instance",nodes="1"}[1h]))))`)
	d.stat("Given up", "Updates of the last hour that were not measured to the end because too many newer ones followed.", "short",
		`sum(increase(slicecast_server_unconverged_updates_total{instance=~"$instance"}[1h]))`)
	for _, share := range []struct{ label, name string }{{"0.5", "half"}, {"0.99", "99 %"}, {"1", "all"}} {
		matcher := fmt.Sprintf(`nodes="%s"`, share.label)
		d.chart("Time until "+share.name+" of the nodes have a change", "From the publish until the kernel of the last of them has it.", "s",
			query{quantile("0.5", "le", metric, matcher), "50 % of changes"},
			query{quantile("0.99", "le", metric, matcher), "99 % of changes"})
	}
	d.chart("Missed objective", "Share of the changes that 99 % of the nodes did not have within a second, by window.", "percentunit",
		query{slowRatio("5m"), "5 minutes"}, query{slowRatio("1h"), "1 hour"}, query{slowRatio("6h"), "6 hours"})
	d.chart("From the change in the cluster to the kernel", "kube-proxy's measure: from the EndpointSlice's trigger time, by the agents.", "s",
		query{`histogram_quantile(0.5, sum by (le) (rate(kubeproxy_network_programming_duration_seconds_bucket{job="slicecast-agent"}[$__rate_interval])))`, "50 %"},
		query{`histogram_quantile(0.99, sum by (le) (rate(kubeproxy_network_programming_duration_seconds_bucket{job="slicecast-agent"}[$__rate_interval])))`, "99 %"})
	d.chart("Bytes of an update", "Before TLS and HTTP/2; every stream receives the same.", "bytes",
		query{quantile("0.5", "le", "slicecast_server_update_size_bytes"), "50 %"},
		query{quantile("0.99", "le", "slicecast_server_update_size_bytes"), "99 %"})
	return d
}

func servers() *dashboard {
	d := newDashboard("slicecast-servers", "Slicecast / Servers",
		"What the servers read from the API server and send to agents and relays.", "slicecast_server_nodes")
	instance := `{instance=~"$instance"}`
	d.stat("Servers", "Servers and relays that answer Prometheus.", "short", "count(slicecast_server_nodes"+instance+")")
	d.stat("Streams", "Open streams of agents, relays and observers.", "short", "sum(slicecast_server_streams"+instance+")")
	d.stat("Nodes", "Nodes that the chosen servers serve, also through relays.", "short", allNodes)
	d.stat("Nacks, last hour", "Objects that nodes could not program.", "short", "sum(increase(slicecast_server_nacks_total"+instance+"[1h]))")
	d.stat("First certificate ends", "Time until the first certificate of a server ends.", "s",
		"min(slicecast_server_certificate_expiry_timestamp_seconds"+instance+") - time()")
	d.stat("Silence of the API server", "Longest time since the last event about a kind of objects. Bookmarks arrive about once a minute.",
		"s", "max(time() - slicecast_source_kube_last_event_timestamp_seconds"+instance+")")
	d.chart("Nodes by server", "Agents spread over the servers.", "short", query{"slicecast_server_nodes" + instance, "{{instance}}"})
	d.chart("Starts of streams", "What clients held when they connected. Nodes that hold nothing receive everything.", "cps",
		query{rate("start", "slicecast_server_stream_starts_total"), "{{start}}"})
	d.chart("Updates and acks", "An ack may stand for several updates.", "cps",
		query{rate("instance", "slicecast_server_updates_total"), "updates of {{instance}}"},
		query{rate("instance", "slicecast_server_acks_total"), "acks to {{instance}}"})
	d.chart("Bytes sent", "On all streams, before TLS and HTTP/2.", "Bps", query{rate("instance", "slicecast_server_sent_bytes_total"), "{{instance}}"})
	d.chart("Time to publish", "From pending changes to the encoded update.", "s",
		query{quantile("0.5", "instance, le", "slicecast_server_publish_duration_seconds"), "50 % at {{instance}}"},
		query{quantile("0.99", "instance, le", "slicecast_server_publish_duration_seconds"), "99 % at {{instance}}"})
	d.chart("Trouble of streams", "Nacks, requests to send state again, streams that were too slow, and streams that replaced others.", "cps",
		query{rate("instance", "slicecast_server_nacks_total"), "nacks to {{instance}}"},
		query{rate("instance", "slicecast_server_resyncs_total"), "resyncs at {{instance}}"},
		query{rate("instance", "slicecast_server_lapped_streams_total"), "slow streams of {{instance}}"},
		query{rate("instance", "slicecast_server_replaced_streams_total"), "replaced streams of {{instance}}"})
	d.chart("Watches and lists", "Lists after the start mean that watches could not be resumed.", "cps",
		query{rate("kind", "slicecast_source_kube_watches_total"), "watches of {{kind}}"},
		query{rate("kind", "slicecast_source_kube_lists_total"), "lists of {{kind}}"})
	d.chart("Silence of the API server by kind", "Time since the last event.", "s",
		query{"time() - max by (kind) (slicecast_source_kube_last_event_timestamp_seconds" + instance + ")", "{{kind}}"})
	d.chart("Warnings", "Nodes on which something should be mended.", "short",
		query{"sum by (warning) (slicecast_server_node_warnings" + instance + ")", "{{warning}}"})
	d.chart("Refused calls and connections", "By reason; all of them should be rare.", "cps",
		query{rate("reason", "slicecast_server_refused_calls_total"), "calls: {{reason}}"},
		query{rate("reason", "slicecast_server_refused_connections_total"), "connections: {{reason}}"})
	d.process("slicecast_server_nodes")
	return d
}

func relays() *dashboard {
	d := newDashboard("slicecast-relays", "Slicecast / Relays",
		"The relays' streams from the servers. A relay is a server, too: see the dashboard of the servers.", "slicecast_upstream_connected")
	instance := `{instance=~"$instance"}`
	d.stat("Relays", "Relays that answer Prometheus.", "short", "count(slicecast_upstream_connected"+instance+")")
	d.stat("In sync", "Relays with a stream that is in sync.", "short", "sum(slicecast_upstream_connected"+instance+")")
	d.stat("Nodes", "Nodes behind the relays.", "short", "sum(slicecast_server_nodes"+instance+" and on (instance) slicecast_upstream_connected)")
	d.stat("Nacks, last hour", "Objects that the relays or their nodes could not decode or program.", "short",
		"sum(increase(slicecast_upstream_nacks_total"+instance+"[1h]))")
	d.chart("In sync", "1 while a relay has a stream that is in sync.", "short", query{"slicecast_upstream_connected" + instance, "{{instance}}"})
	d.chart("Nodes by relay", "Nodes that each relay serves.", "short",
		query{"slicecast_server_nodes" + instance + " and on (instance) slicecast_upstream_connected", "{{instance}}"})
	d.chart("Bytes received", "From the servers, before TLS and HTTP/2.", "Bps", query{rate("instance", "slicecast_upstream_received_bytes_total"), "{{instance}}"})
	d.chart("Bytes sent for each byte received", "What the relays save the servers.", "short",
		query{"(" + rate("instance", "slicecast_server_sent_bytes_total") + ") / (" + rate("instance", "slicecast_upstream_received_bytes_total") + " > 0)",
			"{{instance}}"})
	d.chart("Disconnects and moves", "Streams that ended, failed attempts, and moves to the preferred server.", "cps",
		query{rate("instance", "slicecast_upstream_disconnects_total"), "disconnects of {{instance}}"},
		query{rate("instance", "slicecast_upstream_moves_total"), "moves of {{instance}}"})
	d.chart("Resyncs", "Requests to send state again, by reason.", "cps", query{rate("reason", "slicecast_upstream_resyncs_total"), "{{reason}}"})
	d.process("slicecast_upstream_connected")
	return d
}

func agents() *dashboard {
	d := newDashboard("slicecast-agents", "Slicecast / Agents",
		"What the agents receive and program. Choose few instances in a large cluster.", "slicecast_agent_connected")
	instance := `{instance=~"$instance"}`
	d.stat("Agents", "Agents that answer Prometheus.", "short", "count(slicecast_agent_connected"+instance+")")
	d.stat("In sync", "Agents with a stream that is in sync.", "short", "sum(slicecast_agent_connected"+instance+")")
	d.stat("From a checkpoint", "Nodes with rules that no server has confirmed.", "short", "sum(slicecast_agent_stale"+instance+")")
	d.stat("Failed families", "IP families of nodes of which nothing is known to be programmed.", "short",
		"sum(slicecast_agent_failed_families"+instance+")")
	d.stat("Failed Services", "Services that are not completely programmed, summed over the nodes.", "short",
		"sum(slicecast_agent_failed_services"+instance+")")
	d.stat("Warnings", "Things to mend on nodes.", "short", "sum(slicecast_agent_warnings"+instance+")")
	d.chart("Time to program changes", "One operation, which may have several changes.", "s",
		query{quantile("0.5", "le", "slicecast_agent_program_duration_seconds", `operation="apply"`), "50 %"},
		query{quantile("0.99", "le", "slicecast_agent_program_duration_seconds", `operation="apply"`), "99 %"})
	d.chart("Operations", "Of changes (apply) and of the whole state (replace).", "cps",
		query{rate("operation", "slicecast_agent_program_duration_seconds_count"), "{{operation}}"})
	d.chart("Errors and repairs", "Operations that could not program everything, and repairs of rules that others changed.", "cps",
		query{rate("instance", "slicecast_agent_program_errors_total"), "errors on {{instance}}"},
		query{rate("instance", "slicecast_agent_repairs_total"), "repairs on {{instance}}"})
	d.chart("Bytes received", "From the servers, before TLS and HTTP/2.", "Bps",
		query{rate("instance", "slicecast_agent_received_bytes_total"), "{{instance}}"})
	d.chart("Disconnects and moves", "Streams that ended, failed attempts, and moves to the preferred server.", "cps",
		query{rate("instance", "slicecast_agent_disconnects_total"), "disconnects of {{instance}}"},
		query{rate("instance", "slicecast_agent_moves_total"), "moves of {{instance}}"})
	d.chart("Service ports", "Ports that each node serves, once for each IP family.", "short",
		query{"slicecast_agent_service_ports" + instance, "{{instance}}"})
	d.chart("Programmers", "Nodes by the programmer in use.", "short",
		query{"count by (programmer) (slicecast_agent_programmer_info" + instance + ")", "{{programmer}}"})
	d.chart("Servers", "Nodes by the server of their last stream.", "short",
		query{"count by (address, version) (slicecast_agent_server_info" + instance + ")", "{{address}} {{version}}"})
	d.chart("Removed UDP flows", "Stale flows that were removed from the kernel's connection tracking table.", "cps",
		query{rate("instance", "slicecast_agent_conntrack_removed_flows_total"), "{{instance}}"})
	d.chart("Age of the checkpoint", "Time since the last checkpoint was written.", "s",
		query{"time() - (slicecast_agent_checkpoint_timestamp_seconds" + instance + " > 0)", "{{instance}}"})
	d.process("slicecast_agent_service_ports")
	return d
}
