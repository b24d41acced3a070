// This test proves that each query of the Grafana dashboards returns data of a running cluster, and
// that no alert fires while the cluster is healthy. Each alert fires when its cause is made, and no
// other does but those with the same cause.
package e2e

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	prom "github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/ca"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/source/kube"
	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/prometheus"
	"github.com/slicecast/slicecast/server/certificates"
)

// monitoring is the folder with the rules and dashboards.
const monitoring = "../../deploy/helm/slicecast/monitoring"

const relayPort, unreachedPort = 8482, 8492

// monitored is a cluster whose metrics are scraped: a server with the agent on node a, and a relay
// with the agent on node b.
type monitored struct {
	*cluster
	relay    *process
	ca       *ca.CA
	clients  string // the file with the CA of clients
	timeline prometheus.Timeline
	targets  map[string]prometheus.Target // by instance: server, relay, a and b
}

func newMonitored(t *testing.T) *monitored {
	t.Helper()
	c := &cluster{t: t, cp: shared, api: shared.Client(), namespace: shared.Namespace(t), dir: t.TempDir()}
	t.Cleanup(c.deleteServicesAndPods)
	c.a, c.b = c.addNode("a", "nft"), c.addNode("b", "legacy")
	m := &monitored{cluster: c, targets: make(map[string]prometheus.Target)}
	var err error
	m.ca, err = ca.New("servers", ca.Validity{NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(2, 0, 0)})
	require.NoError(t, err)
	certificate, _, err := m.ca.PEM()
	require.NoError(t, err)
	c.serverCA = writeFile(t, c.dir, "servers.crt", certificate)
	m.clients = writeFile(t, c.dir, "clients.crt", c.cp.AdminConfig().CAData)

	world := network.World.IPv4
	c.server = m.newServer("slicecast-server", "server", serverPort, "--heartbeat-interval=2s", m.kubeconfig())
	c.server.Start()
	c.server.AwaitReady()
	cert, key := writeClientCertificate(t, c.dir, "relay-client", c.cp.ConfigFor("relay", "slicecast:relays"))
	// An agent that is stopped for some seconds must not take the relay for silent.
	m.relay = m.newServer("slicecast-relay", "relay", relayPort, "--heartbeat-interval=1m", "--source=upstream",
		fmt.Sprintf("--upstream-servers=%s:%d", world, serverPort), "--upstream-ca-file="+c.serverCA,
		"--upstream-client-cert-file="+cert, "--upstream-client-key-file="+key)
	m.relay.Start()
	m.relay.AwaitReady()

	for n, port := range map[*node]int{c.a: serverPort, c.b: relayPort} {
		require.NoError(t, os.MkdirAll(m.checkpoints(n), 0o755))
		cert, key := writeClientCertificate(t, c.dir, n.Name, c.cp.ConfigFor("system:node:"+n.Name, "system:nodes"))
		n.agent = newProcess(t, n.Host, agentCommand, "agent on "+n.Name, "127.0.0.1:10256", append(c.agentArgs(n),
			fmt.Sprintf("--servers=%s:%d", world, port), "--ca-file="+c.serverCA, "--client-cert-file="+cert, "--client-key-file="+key,
			"--checkpoint="+filepath.Join(m.checkpoints(n), "checkpoint")))
		m.startAgent(n)
		m.target("slicecast-agent", n.Name, n.Host, "http://127.0.0.1:10249/metrics")
	}
	return m
}

// newServer returns a server or relay that is not started yet, and adds its target.
func (m *monitored) newServer(job, name string, port int, args ...string) *process {
	m.t.Helper()
	world := network.World.IPv4
	m.certify(name, 365)
	m.target(job, name, network.World, fmt.Sprintf("https://%s:%d/metrics", world, port+2))
	return newProcess(m.t, network.World, serverCommand, name, fmt.Sprint("127.0.0.1:", port+1), append([]string{
		fmt.Sprintf("--bind-address=%s:%d", world, port), fmt.Sprintf("--metrics-bind-address=%s:%d", world, port+2),
		"--tls-cert-file=" + filepath.Join(m.dir, name+".crt"), "--tls-private-key-file=" + filepath.Join(m.dir, name+".key"),
		"--client-ca-file=" + m.clients, "--drain-window=100ms",
	}, args...))
}

// kubeconfig returns the flag of a server for the API server.
func (m *monitored) kubeconfig() string {
	return "--kubeconfig=" + m.cp.Kubeconfig(m.t, m.cp.AdminConfig())
}

// startAgent starts the agent on a node, which prefers the programs in the folder m.programs.
func (m *monitored) startAgent(n *node) {
	m.t.Helper()
	path := "PATH=" + m.programs() + ":" + os.Getenv("PATH")
	require.NoError(m.t, n.agent.Command.Start([]string{path}, n.agent.path, n.agent.args...))
	n.agent.AwaitReady()
}

func (m *monitored) programs() string           { return filepath.Join(m.dir, "programs") }
func (m *monitored) checkpoints(n *node) string { return filepath.Join(m.dir, "checkpoints-"+n.Name) }

// certify writes a certificate for a server that ends in some days.
func (m *monitored) certify(name string, days int) {
	m.t.Helper()
	c, err := m.ca.Issue(ca.Serving(network.World.IPv4.String()),
		ca.Validity{NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(0, 0, days)})
	require.NoError(m.t, err)
	_, _, err = testca.Write(m.dir, name, c)
	require.NoError(m.t, err)
}

const published = "slicecast_server_ca_published"

// keepCA adds a target with the metrics of a server's CA. The CA was created years ago, and is
// followed by a new one that issues in a month. The ConfigMap of the agents cannot be written
// before the function that it returns is called.
func (m *monitored) keepCA(name string) (publish func()) {
	m.t.Helper()
	core, _, err := kube.Core(m.cp.AdminConfig())
	require.NoError(m.t, err)
	const day = 24 * time.Hour
	// A CA of five years is followed by another one when 455 days are left, which issues after 365.
	var behind atomic.Int64
	behind.Store(int64((5*365 - 455 + 335) * day))
	registry := prom.NewRegistry()
	keeper := certificates.New(certificates.Options{
		Client: core, Secret: types.NamespacedName{Namespace: "default", Name: "monitored-tls"},
		ConfigMaps: []types.NamespacedName{{Namespace: "published-later", Name: "ca"}}, Names: []string{"server.test"},
		Now:      func() time.Time { return time.Now().Add(-time.Duration(behind.Load())) },
		Interval: 10 * time.Millisecond, Log: slog.New(slog.DiscardHandler), Registerer: registry,
	})
	ctx, cancel := context.WithCancel(m.t.Context())
	var running sync.WaitGroup
	running.Go(func() { keeper.Run(ctx) })
	m.t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	m.targets[name] = prometheus.Target{Job: "slicecast-server", Instance: name, Scrape: func(context.Context) (string, error) {
		w := httptest.NewRecorder()
		daemon.MetricsHandler(registry).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
		return w.Body.String(), nil
	}}
	return func() {
		_, err := m.api.CoreV1().Namespaces().Create(m.t.Context(), &corev1.Namespace{
			ObjectMeta: metav1.ObjectMeta{Name: "published-later"},
		}, metav1.CreateOptions{})
		require.NoError(m.t, err)
		m.await(name, published, 1, 1)
		behind.Store(int64(335 * day))
		testenv.Eventually(m.t, settleTimeout, func() error {
			_, err := keeper.Content()
			return err
		})
	}
}

// target adds a target at a URL, as a host sees it. The credentials are those of an administrator.
func (m *monitored) target(job, instance string, host *testenv.Host, url string) {
	m.t.Helper()
	admin := m.cp.AdminConfig()
	config, err := rest.TLSConfigFor(&rest.Config{TLSClientConfig: rest.TLSClientConfig{
		CAFile: m.serverCA, CertData: admin.CertData, KeyData: admin.KeyData,
	}})
	require.NoError(m.t, err)
	m.targets[instance] = prometheus.Target{Job: job, Instance: instance, Scrape: scraper(host, config, url)}
}

// scraper returns a function that gets a page from a host.
func scraper(host *testenv.Host, config *tls.Config, url string) func(context.Context) (string, error) {
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return host.DialContext(ctx, network, address)
		},
		TLSClientConfig: config, DisableKeepAlives: true,
	}}
	return func(ctx context.Context) (string, error) {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return "", err
		}
		response, err := client.Do(request)
		if err != nil {
			return "", err
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		if err == nil && response.StatusCode != http.StatusOK {
			err = errors.New(response.Status)
		}
		return string(body), err
	}
}

// scrape scrapes all targets.
func (m *monitored) scrape() {
	m.timeline.Scrape(m.t.Context(), slices.Collect(maps.Values(m.targets))...)
}

var errNoSeries = errors.New("no series")

// value returns the value of a series of an instance now, written as on the page.
func (m *monitored) value(instance, series string) (float64, error) {
	page, err := m.targets[instance].Scrape(m.t.Context())
	if err != nil {
		return 0, err
	}
	match := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(series) + ` (\S+)$`).FindStringSubmatch(page)
	if match == nil {
		return 0, fmt.Errorf("%s: %w %s", instance, errNoSeries, series)
	}
	return strconv.ParseFloat(match[1], 64)
}

// await waits until the value of a series is between two values, or one of them.
func (m *monitored) await(instance, series string, least, most float64) {
	m.t.Helper()
	testenv.Eventually(m.t, settleTimeout, func() error {
		v, err := m.value(instance, series)
		if err == nil && (v < least || v > most) {
			err = fmt.Errorf("%s of %s is %v, want %v to %v", series, instance, v, least, most)
		}
		return err
	})
}

// awaitMore waits until f has made the value of a series grow. A series that does not exist yet
// grows from 0.
func (m *monitored) awaitMore(instance, series string, by float64, f func()) {
	m.t.Helper()
	before, err := m.value(instance, series)
	if !errors.Is(err, errNoSeries) {
		require.NoError(m.t, err)
	}
	f()
	m.await(instance, series, before+by, before+1e9)
}

// The series by which the test follows what happens.
const (
	updates   = "slicecast_server_updates_total"
	converged = `slicecast_server_convergence_duration_seconds_count{nodes="0.99"}`
	inSync    = "slicecast_agent_connected"
	applied   = `slicecast_agent_program_duration_seconds_count{operation="apply"}`
	replaced  = `slicecast_agent_program_duration_seconds_count{operation="replace"}`
)

// refusing is an ip6tables-restore that refuses rules with refusedPort, as a kernel may refuse what
// it does not know.
const (
	refusedPort = 4243
	refusing    = `#!/bin/bash
input=$(cat)
[[ $input != *4243* ]] || { echo "refused" >&2; exit 1; }
exec /usr/sbin/ip6tables-nft-restore "$@" <<<"$input"
`
)

// slowShare returns the share of all changes so far that some node did not have within a second, by
// the server or the relay.
func (m *monitored) slowShare() (share float64) {
	m.t.Helper()
	for _, instance := range []string{"server", "relay"} {
		within, err := m.value(instance, `slicecast_server_convergence_duration_seconds_bucket{nodes="0.99",le="1.024"}`)
		require.NoError(m.t, err)
		all, err := m.value(instance, converged)
		require.NoError(m.t, err)
		share = max(share, 1-within/all)
	}
	m.t.Logf("%.1f %% of the changes took longer than a second", 100*share)
	return share
}

func TestMonitoring(t *testing.T) {
	m := newMonitored(t)
	pods := m.Deployment("web", 4)
	m.Service("web", selecting("web", tcp("tcp", 80, onPodPort())))
	// The pods take turns: if one turned ready before the controller has seen that it was not, there
	// would be no change.
	changes := 0
	change := func() {
		m.awaitMore("server", updates, 1, func() { m.SetReady(pods[changes%4], changes/4%2 == 1) })
		changes++
	}
	rules, err := os.ReadFile(filepath.Join(monitoring, "rules.yaml"))
	require.NoError(t, err)

	// stages are the periods of the timeline, with the alerts that must fire in each.
	type stage struct {
		name     string
		from, to time.Time
		want     []string
	}
	var stages []stage
	// during adds a stage: the state of now, for some time.
	during := func(name string, d time.Duration, want ...string) {
		m.scrape()
		from := m.timeline.Now()
		m.timeline.Hold(d)
		slices.Sort(want)
		stages = append(stages, stage{name, from, m.timeline.Now(), want})
	}
	// recovered lets the windows of all alerts but the objectives' pass.
	recovered := func() {
		m.scrape()
		m.timeline.Hold(70 * time.Minute)
	}

	m.scrape()
	begin := m.timeline.Now()
	m.awaitMore("relay", converged, 2, func() {
		m.awaitMore("server", converged, 2, func() {
			for range 6 {
				for range 5 {
					m.awaitMore("a", applied, 1, func() { m.awaitMore("b", applied, 1, change) })
				}
				m.scrape()
			}
		})
	})
	m.scrape()
	busy := m.timeline.Now()
	during("healthy", time.Hour)
	stages[0].from = begin
	slow := m.slowShare()

	const expiry = "slicecast_server_certificate_expiry_timestamp_seconds"
	certify := func(days int) {
		m.certify("server", days)
		end := float64(time.Now().AddDate(0, 0, days).Unix())
		m.await("server", expiry, end-120, end+1)
	}
	certify(10)
	during("certificate of 10 days", 30*time.Minute, "SlicecastCertificateExpiresSoon")
	certify(1)
	during("certificate of 1 day", 30*time.Minute, "SlicecastCertificateExpiresSoon", "SlicecastCertificateExpires")
	certify(365)
	recovered()

	publish := m.keepCA("cas")
	m.await("cas", published, 0, 0)
	during("CAs are not published", 40*time.Minute, "SlicecastCANotPublished")
	publish()
	m.await("cas", published, 1, 1)
	change60 := float64(time.Now().AddDate(0, 0, 60).Unix())
	m.await("cas", "slicecast_server_ca_change_timestamp_seconds", 1, change60)
	during("another CA will issue", 80*time.Minute, "SlicecastCAChanges")
	delete(m.targets, "cas")
	recovered()

	require.NoError(t, os.MkdirAll(m.programs(), 0o755))
	const nacks, failed = "slicecast_server_nacks_total", "slicecast_agent_failed_services"
	program := filepath.Join(m.programs(), "ip6tables-nft-restore")
	require.NoError(t, os.WriteFile(program, []byte(refusing), 0o755))
	var refused *service
	m.awaitMore("server", nacks, 1, func() {
		refused = m.Service("refused", selecting("web", tcp("tcp", refusedPort, onPodPort())))
	})
	m.await("a", failed, 1, 1)
	during("a Service is refused", 20*time.Minute, "SlicecastNacks", "SlicecastServicesFailed")
	m.DeleteService(refused)
	m.await("a", failed, 0, 0)
	recovered()

	require.NoError(t, os.WriteFile(program, []byte("#!/bin/sh\nexit 1\n"), 0o755))
	m.awaitMore("server", nacks, 1, change)
	m.await("a", `slicecast_agent_failed_families{family="IPv6"}`, 1, 1)
	m.await("a", failed, 0, 0) // a failed family replaces the failures of its Services
	during("ip6tables fails", 20*time.Minute, "SlicecastFamilyFailed", "SlicecastNacks")
	require.NoError(t, os.Remove(program))
	m.await("a", `slicecast_agent_failed_families{family="IPv6"}`, 0, 0)
	recovered()

	for range 3 {
		// A repair counts when it begins. Rules that are flushed meanwhile are repaired by it, too.
		m.awaitMore("a", replaced, 1, func() {
			_, err := m.a.Run(t.Context(), "iptables-nft", "-t", "nat", "-F")
			require.NoError(t, err)
		})
	}
	during("others flush the rules", 20*time.Minute, "SlicecastRulesChanged")
	recovered()

	require.NoError(t, m.cp.APIServer.Kill())
	const unreached = "unreached"
	late := m.newServer("slicecast-server", unreached, unreachedPort, m.kubeconfig())
	late.Start()
	m.await(unreached, "slicecast_server_nodes", 0, 0)
	m.scrape()
	m.timeline.Age(true)
	during("no API server", 20*time.Minute, "SlicecastWatchLag")
	m.timeline.Age(false)
	late.Terminate()
	delete(m.targets, unreached)
	require.NoError(t, m.cp.APIServer.Start(t.Context()))
	recovered()

	m.server.Kill()
	m.await("a", inSync, 0, 0)
	m.await("relay", "slicecast_upstream_connected", 0, 0)
	gone := []string{"SlicecastNodeStale", "SlicecastRelayDisconnected", "SlicecastServerUnreachable", "SlicecastServersDown"}
	during("no server", 20*time.Minute, slices.Clone(gone)...)
	m.a.agent.Terminate()
	m.startAgent(m.a)
	m.await("a", "slicecast_agent_stale", 1, 1)
	during("no server, and an agent has restarted", 20*time.Minute, append(gone, "SlicecastCheckpointOnly")...)
	m.server.Start()
	m.server.AwaitReady()
	m.await("a", inSync, 1, 1)
	m.await("relay", "slicecast_upstream_connected", 1, 1)
	m.await("server", "slicecast_server_nodes", 2, 2)
	recovered()

	m.b.agent.Terminate()
	during("no agent", 20*time.Minute, "SlicecastAgentUnreachable")
	m.startAgent(m.b)
	m.await("b", inSync, 1, 1)
	m.await("server", "slicecast_server_nodes", 2, 2)
	recovered()

	m.relay.Kill()
	m.await("b", inSync, 0, 0)
	during("no relay", 20*time.Minute, "SlicecastNodeStale", "SlicecastServerUnreachable")
	m.relay.Start()
	m.relay.AwaitReady()
	m.await("b", inSync, 1, 1)
	m.await("server", "slicecast_server_nodes", 2, 2)
	recovered()

	all := maps.Clone(m.targets)
	maps.DeleteFunc(m.targets, func(_ string, target prometheus.Target) bool { return target.Job == "slicecast-agent" })
	during("agents are not scraped", 40*time.Minute, "SlicecastAgentsNotScraped")
	m.targets = all
	recovered()

	signal := func(s syscall.Signal) { require.NoError(t, syscall.Kill(m.b.agent.Pid(), s)) }
	m.awaitMore("server", converged, 40, func() {
		signal(syscall.SIGSTOP)
		defer signal(syscall.SIGCONT)
		for range 40 {
			change()
		}
		<-time.After(1100 * time.Millisecond) // the cause: a node needs more than a second
	})
	m.await("b", inSync, 1, 1)
	during("a slow node", time.Hour, "SlicecastConvergenceSlow", "SlicecastConvergenceDegraded")
	recovered()

	const range4, errs = `slicecast_server_node_warnings{warning="pod_range_ipv4"}`, "slicecast_agent_checkpoint_errors_total"
	m.replaceNode(m.b, "10.99.3.0/24")
	away := m.checkpoints(m.a) + "-away"
	require.NoError(t, os.Rename(m.checkpoints(m.a), away))
	m.awaitMore("a", errs, 1, change)
	m.await("relay", range4, 1, 1)
	during("wrong range, no place for checkpoints", 20*time.Minute, "SlicecastCheckpointErrors", "SlicecastNodeWarnings")
	require.NoError(t, os.Rename(away, m.checkpoints(m.a)))

	// Checkpoints are written only some time after the first changes.
	queries := dashboardQueries(t)
	var timed []prometheus.Query
	for _, q := range queries {
		timed = append(timed, prometheus.Query{Expression: q, Time: busy}, prometheus.Query{Expression: q, Time: stages[len(stages)-1].from})
	}
	result, err := m.timeline.Evaluate(t.Context(), string(rules), timed...)
	require.NoError(t, err)
	for i, q := range queries {
		samples := slices.Concat(result.Samples[2*i], result.Samples[2*i+1])
		if !slices.ContainsFunc(samples, func(s prometheus.Sample) bool { return s.Value != "NaN" }) {
			t.Errorf("no data: %s: %v", q, samples)
		}
	}
	caused := make(map[string]bool)
	for i, s := range stages {
		firing := result.Firing(s.from, s.to)
		// What a node cannot program does not reach it within a second, either. And a machine may be
		// too busy for the objective.
		objectives := i == 0 && slow <= 0.03 || slices.Contains(s.want, "SlicecastConvergenceSlow")
		if !objectives {
			firing = slices.DeleteFunc(firing, func(name string) bool { return strings.HasPrefix(name, "SlicecastConvergence") })
		}
		require.ElementsMatch(t, s.want, firing, s.name)
		for _, name := range s.want {
			caused[name] = true
		}
	}
	for _, name := range regexp.MustCompile(`(?m)^ +- alert: (\S+)$`).FindAllStringSubmatch(string(rules), -1) {
		require.True(t, caused[name[1]], "the cause of %s is missing in this test", name[1])
	}
	silent := make(map[string]bool) // the instances to which the API server is silent
	for _, a := range result.Alerts {
		if a.Name == "SlicecastWatchLag" {
			silent[a.Labels["instance"]] = true
		}
		for _, text := range a.Annotations {
			require.NotContains(t, text, "<", a.Name) // neither <no value> nor <error expanding template: …>
		}
	}
	require.Equal(t, map[string]bool{"server": true, unreached: true}, silent, "lost, and never reached")
}

// replaceNode creates a Node anew with another range of IPv4 pods, because it cannot be changed.
func (m *monitored) replaceNode(n *node, range4 string) {
	m.t.Helper()
	nodes := m.api.CoreV1().Nodes()
	object, err := nodes.Get(m.t.Context(), n.Name, metav1.GetOptions{})
	require.NoError(m.t, err)
	require.NoError(m.t, nodes.Delete(m.t.Context(), n.Name, metav1.DeleteOptions{}))
	object.ResourceVersion, object.UID = "", ""
	object.Spec.PodCIDR, object.Spec.PodCIDRs = range4, []string{range4, n.PodCIDR6.String()}
	_, err = nodes.Create(m.t.Context(), object, metav1.CreateOptions{})
	require.NoError(m.t, err)
}

// dashboardQueries returns the queries of all dashboards with the variables that Grafana would set.
func dashboardQueries(t *testing.T) (queries []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(monitoring, "dashboards", "*.json"))
	require.NoError(t, err)
	require.Len(t, files, 4)
	variables := strings.NewReplacer("$instance", ".+", "$__rate_interval", "2m")
	labelValues := regexp.MustCompile(`^label_values\((\w+), (\w+)\)$`)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		var dashboard struct {
			Templating struct {
				List []struct{ Type, Query string }
			}
			Panels []struct{ Targets []struct{ Expr string } }
		}
		require.NoError(t, json.Unmarshal(text, &dashboard))
		for _, v := range dashboard.Templating.List {
			if v.Type == "query" {
				parts := labelValues.FindStringSubmatch(v.Query)
				require.NotNil(t, parts, v.Query)
				queries = append(queries, fmt.Sprintf(`%s{%s!=""}`, parts[1], parts[2]))
			}
		}
		for _, p := range dashboard.Panels {
			for _, target := range p.Targets {
				expression := variables.Replace(target.Expr)
				require.NotContains(t, expression, "$", target.Expr)
				queries = append(queries, expression)
			}
		}
	}
	return queries
}
