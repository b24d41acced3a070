package main

import (
	"fmt"
	"strings"
)

// ruleFile is a file of rules as Prometheus reads it, and the spec of a PrometheusRule.
type ruleFile struct {
	Groups []ruleGroup `yaml:"groups"`
}

type ruleGroup struct {
	Name  string `yaml:"name"`
	Rules []rule `yaml:"rules"`
}

// rule records a series or raises an alert.
type rule struct {
	Record      string            `yaml:"record,omitempty"`
	Alert       string            `yaml:"alert,omitempty"`
	Expr        string            `yaml:"expr"`
	For         string            `yaml:"for,omitempty"`
	Labels      map[string]string `yaml:"labels,omitempty"`
	Annotations map[string]string `yaml:"annotations,omitempty"`
}

// severity says how soon somebody should look: now, or during working hours.
type severity string

const (
	critical severity = "critical"
	warning  severity = "warning"
)

// runbook is the page that has an entry for each alert.
const runbook = "https://github.com/slicecast/slicecast/blob/main/docs/runbook.md#"

// alert returns the rule of an alert. wait is how long expr must hold. summary is one sentence
// about all instances, and description is about the instance in the labels.
func alert(name string, s severity, wait, expr, summary, description string) rule {
	return rule{
		Alert: name, Expr: expr, For: wait, Labels: map[string]string{"severity": string(s)},
		Annotations: map[string]string{
			"summary": summary, "description": description, "runbook_url": runbook + strings.ToLower(name),
		},
	}
}

// The objective: 99 % of changes are programmed on 99 % of the nodes within a second. The bucket of
// the histogram that is nearest to a second ends at 1.024 s.
const (
	objective = 0.99
	second    = "1.024"
	// fewUpdates is the number of updates up to which no share of them is an alert.
	fewUpdates = 50
)

// slowRatio returns an expression for the share of changes that missed the objective's time within
// a window. Changes that were never measured to the end count as slow.
func slowRatio(window string) string {
	within := fmt.Sprintf(`sum(rate(slicecast_server_convergence_duration_seconds_bucket{nodes="0.99",le="%s"}[%s]))`, second, window)
	all := fmt.Sprintf(`sum(rate(slicecast_server_convergence_duration_seconds_count{nodes="0.99"}[%[1]s])) + `+
		`sum(rate(slicecast_server_unconverged_updates_total[%[1]s]))`, window)
	return fmt.Sprintf("1 - %s / (%s)", within, all)
}

func slowRecord(window string) string { return "slicecast:convergence_slow:ratio_rate" + window }

// burns returns the expression of an alert on the error budget: both windows use it up this many
// times as fast as the objective allows. The short one ends the alert soon after the cause ended. A
// few updates say nothing, such as those of an installation.
func burns(long, short string, factor float64) string {
	return fmt.Sprintf("%s > %.4[3]g and %[2]s > %.4[3]g and sum(increase(slicecast_server_updates_total[%[4]s])) > %[5]d",
		slowRecord(long), slowRecord(short), factor*(1-objective), long, fewUpdates)
}

func ruleGroups() []ruleGroup {
	objectives := ruleGroup{Name: "slicecast-objectives"}
	for _, window := range []string{"5m", "30m", "1h", "6h"} {
		objectives.Rules = append(objectives.Rules, rule{Record: slowRecord(window), Expr: slowRatio(window)})
	}
	const slow = "Changes take longer than a second to reach the nodes."
	describe := func(long string) string {
		return "{{ $value | humanizePercentage }} of the changes of the last " + long + " were not programmed on 99 % of the nodes " +
			"within a second. The objective allows 1 %."
	}
	objectives.Rules = append(objectives.Rules,
		alert("SlicecastConvergenceSlow", critical, "2m", burns("1h", "5m", 14.4), slow, describe("hour")),
		alert("SlicecastConvergenceDegraded", warning, "15m", burns("6h", "30m", 6), slow, describe("6 hours")),
	)
	return []ruleGroup{objectives, serverAlerts(), relayAlerts(), agentAlerts()}
}

func serverAlerts() ruleGroup {
	return ruleGroup{Name: "slicecast-servers", Rules: []rule{
		alert("SlicecastServersDown", critical, "5m", `absent(up{job="slicecast-server"} == 1)`,
			"No server of Slicecast answers Prometheus.",
			"No target of the job slicecast-server is up. Nodes keep their rules, but follow no changes."),
		alert("SlicecastServerUnreachable", warning, "10m", `up{job=~"slicecast-(server|relay)"} == 0`,
			"A server or relay of Slicecast does not answer Prometheus.",
			"{{ $labels.instance }} does not answer. Its nodes have moved to other servers of its tier if there are any."),
		alert("SlicecastWatchLag", critical, "5m", `time() - slicecast_source_kube_last_event_timestamp_seconds > 300`,
			"A server hears nothing from the API server.",
			"{{ $labels.instance }} has received no event about {{ $labels.kind }} for {{ $value | humanizeDuration }}, or "+
				"none at all since it started then. Nodes may lack changes."),
		alert("SlicecastCertificateExpiresSoon", warning, "15m",
			`slicecast_server_certificate_expiry_timestamp_seconds < time() + 14 * 24 * 3600`,
			"A server's certificate ends within 14 days.",
			"The certificate of {{ $labels.instance }} ends at {{ $value | humanizeTimestamp }}. It should have been renewed."),
		alert("SlicecastCertificateExpires", critical, "5m",
			`slicecast_server_certificate_expiry_timestamp_seconds < time() + 2 * 24 * 3600`,
			"A server's certificate ends within 2 days, or has ended.",
			"The certificate of {{ $labels.instance }} ends at {{ $value | humanizeTimestamp }}. Agents do not connect after that."),
		alert("SlicecastCANotPublished", warning, "30m", `slicecast_server_ca_published == 0`,
			"The CAs of the servers are not in all ConfigMaps.",
			"{{ $labels.instance }} cannot write the CAs to a ConfigMap. New agents may not be able to connect, and a new CA "+
				"does not issue the servers' certificate."),
		alert("SlicecastCAChanges", warning, "1h",
			`(slicecast_server_ca_change_timestamp_seconds < time() + 60 * 24 * 3600) > 0`,
			"Another CA issues the servers' certificate within 60 days.",
			"From {{ $value | humanizeTimestamp }} on, clients of {{ $labels.instance }} need the new CA in their CA file. Kubelets "+
				"update files from ConfigMaps; copies have to be made again."),
		alert("SlicecastNacks", warning, "", `increase(slicecast_server_nacks_total[15m]) > 0`,
			"Nodes cannot program what they receive.",
			"{{ $labels.instance }} has received {{ $value | humanize }} nacks in 15 minutes, each for an object that a node "+
				"could not program."),
		alert("SlicecastNodeWarnings", warning, "10m", `slicecast_server_node_warnings > 0`,
			"Something should be mended on nodes.",
			"{{ $value }} nodes of {{ $labels.instance }} have the warning {{ $labels.warning }}."),
	}}
}

func relayAlerts() ruleGroup {
	return ruleGroup{Name: "slicecast-relays", Rules: []rule{
		alert("SlicecastRelayDisconnected", critical, "5m", `slicecast_upstream_connected == 0`,
			"A relay has no stream from a server.",
			"The relay {{ $labels.instance }} has had no stream in sync for 5 minutes. Its nodes follow no changes."),
	}}
}

func agentAlerts() ruleGroup {
	return ruleGroup{Name: "slicecast-agents", Rules: []rule{
		alert("SlicecastAgentUnreachable", warning, "15m", `up{job="slicecast-agent"} == 0`,
			"An agent does not answer Prometheus.",
			"The agent {{ $labels.instance }} does not answer. If it does not run, its node follows no changes."),
		alert("SlicecastAgentsNotScraped", warning, "30m", `sum(slicecast_server_nodes) > 0 unless on () up{job="slicecast-agent"}`,
			"Prometheus scrapes no agents.",
			"Servers serve nodes, and there is no target of the job slicecast-agent. No alert about agents can fire."),
		alert("SlicecastNodeStale", critical, "5m", `slicecast_agent_connected == 0`,
			"A node follows no changes.",
			"The agent {{ $labels.instance }} has had no stream in sync for 5 minutes. Its rules stay as they are."),
		alert("SlicecastCheckpointOnly", critical, "5m", `slicecast_agent_stale == 1`,
			"A node has only its checkpoint.",
			"The agent {{ $labels.instance }} has started without reaching a server. The node has the rules of its last checkpoint."),
		alert("SlicecastCheckpointErrors", warning, "", `increase(slicecast_agent_checkpoint_errors_total[30m]) > 0`,
			"A node cannot write its checkpoint.",
			"The agent {{ $labels.instance }} could not write its checkpoint. If it restarts while no server is in reach, the node "+
				"has old rules or none."),
		alert("SlicecastFamilyFailed", critical, "5m", `slicecast_agent_failed_families == 1`,
			"A node cannot program an IP family.",
			"Nothing of {{ $labels.family }} is known to be programmed on the node of the agent {{ $labels.instance }}."),
		alert("SlicecastServicesFailed", warning, "10m", `slicecast_agent_failed_services > 0`,
			"A node cannot program Services.",
			"{{ $value }} Services are not completely programmed on the node of the agent {{ $labels.instance }}."),
		alert("SlicecastRulesChanged", warning, "", `increase(slicecast_agent_repairs_total[1h]) > 2`,
			"Something else changes a node's rules.",
			"The agent {{ $labels.instance }} had to repair its rules {{ $value | humanize }} times in an hour."),
	}}
}
