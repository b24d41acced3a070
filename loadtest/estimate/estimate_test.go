// These tests prove the arithmetic of an estimate: for manifests, for objects that kube-proxy does
// not watch, and for the clusters of the reports in the tree, whose measured figures it must meet.
package estimate

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/slicecast/slicecast/loadtest/performance"
	"github.com/slicecast/slicecast/loadtest/progress"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/report/reporttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const examples = "../../examples"

func run(t *testing.T, o Options) *Estimate {
	t.Helper()
	e, err := Run(t.Context(), o, progress.New(new(bytes.Buffer)))
	require.NoError(t, err)
	return e
}

// value returns a figure, which must exist.
func value(t *testing.T, e *Estimate, name string) float64 {
	t.Helper()
	for _, s := range e.Sections {
		for _, l := range s.Lines {
			if l.Name == name {
				return l.Value
			}
		}
	}
	require.Fail(t, "there is no figure "+name)
	return 0
}

func TestManifests(t *testing.T) {
	const nodes, seconds, perSecond = 3000, 600, 5
	e := run(t, Options{
		Manifests: examples, Watch: seconds * time.Second, FlipsPerSecond: perSecond, Nodes: nodes, APIServers: 3, Servers: 2,
	})
	v := func(name string) float64 { return value(t, e, name) }
	require.EqualValues(t, 4, v("services"))
	require.EqualValues(t, 3, v("slices"))
	require.EqualValues(t, seconds*perSecond, v("slice-events"))
	require.Zero(t, v("service-events"))
	require.EqualValues(t, seconds*perSecond, v("updates"), "one update for each flip")

	flip := v("node-bytes-slicecast") / perSecond
	require.Greater(t, flip, 60., "an update has a name, two versions and a condition")
	require.Less(t, flip, 200.)
	require.Greater(t, v("node-bytes-today"), 10*v("node-bytes-slicecast"), "today, slices of 100 endpoints are sent whole")
	require.InEpsilon(t, nodes*v("node-bytes-today"), v("all-bytes-today"), 1e-9)
	require.InEpsilon(t, v("all-bytes-today")/3, v("api-server-bytes-today"), 1e-9)
	require.InEpsilon(t, nodes*v("node-bytes-slicecast"), v("all-bytes-slicecast"), 1e-9)
	require.InEpsilon(t, 2*v("node-bytes-today"), v("all-bytes-api-server-slicecast"), 1e-9)
	m, err := performance.CheckedIn()
	require.NoError(t, err)
	c, err := measuredCosts(m, 1000, nodes/2)
	require.NoError(t, err)
	watching := 2 * (perSecond + 2./60) * c.nodeEvent.value / 1e6
	require.InEpsilon(t, watching, v("watch-cores-slicecast"), 1e-9, "each server receives what a node receives today")
	require.InEpsilon(t, (perSecond+1./30)*nodes*c.update.value/1e6+watching, v("all-cores-slicecast"), 1e-9, "flips and heartbeats")
	require.InEpsilon(t, 3*v("api-server-cores-today"), v("all-cores-today"), 1e-9)
	writes := v("write-cores")
	require.InEpsilon(t, perSecond*c.write.value/1e6, writes, 1e-9)
	require.InEpsilon(t, 2./nodes*(v("all-cores-today")-writes), v("all-cores-api-server-slicecast")-writes, 1e-9, "the writes cost the same with Slicecast")
	require.Greater(t, v("node-memory-today"), 1000.)
	require.Greater(t, v("node-memory-slicecast"), 1000.)
	empty, endpoint, service := c.stateBytes()
	require.InEpsilon(t, empty+v("endpoints")*endpoint+v("services")*service+nodes/2*c.ram.value, v("server-memory-slicecast"), 1e-9)
	require.Less(t, v("cold-bytes-slicecast"), v("cold-bytes-today"))
	require.Less(t, v("cold-list-bytes-today"), v("cold-bytes-today"))
	require.Greater(t, v("cold-list-bytes-today"), 500.)

	var text, twice strings.Builder
	text.WriteString(e.Text())
	require.Contains(t, text.String(), "/ 600 s")
	for _, l := range short {
		require.NotEmpty(t, e.text(l.slicecast), l.what)
		require.Regexp(t, "(?m)^  "+l.what+` +`+regexp.QuoteMeta(e.text(l.today))+" +"+regexp.QuoteMeta(e.text(l.slicecast))+"$", text.String())
	}
	require.Contains(t, text.String(), "5 endpoints per second flip (--flips-per-second)")
	for _, source := range []string{c.write.source, c.small.source, c.large.source, c.crowd.source, c.update.source, c.nodeEvent.source, c.ram.source, c.smallState.source,
		c.largeState.source, c.manyServices.source} {
		require.Contains(t, text.String(), source)
	}
	require.Contains(t, text.String(), "apiserver-many-small-1000.json, cpu-per-update, nodes: 1000, on ")
	require.Contains(t, text.String(), "The report apiserver-steady-1000 notes: the API server's CPU time includes the writes")
	for _, s := range e.Sections[1:] {
		for _, l := range s.Lines {
			require.NotEmpty(t, l.Arithmetic, l.Name)
		}
	}
	var parsed Estimate
	var out bytes.Buffer
	require.NoError(t, report.WriteJSON(&out, e))
	require.NoError(t, json.Unmarshal(out.Bytes(), &parsed))
	require.Equal(t, Schema, parsed.Schema)
	require.NoError(t, reporttest.ValidateAs(JSONSchema, out.Bytes()))
	twice.WriteString(parsed.Text())
	require.Equal(t, text.String(), twice.String())
}

func TestQuietCluster(t *testing.T) {
	e := run(t, Options{Manifests: examples, Watch: time.Minute, Servers: 2})
	require.Greater(t, value(t, e, "nodes"), 0., "the manifests have nodes")
	require.EqualValues(t, 1, value(t, e, "api-servers"))
	require.Greater(t, value(t, e, "all-cores-today"), 0., "bookmarks cost CPU time")
	require.Greater(t, value(t, e, "all-cores-slicecast"), 0., "heartbeats cost CPU time")
	require.Greater(t, value(t, e, "node-bytes-today"), 0., "bookmarks have bytes")
	require.Greater(t, value(t, e, "node-bytes-slicecast"), 0., "heartbeats have bytes")
}

func TestKubectlManifests(t *testing.T) {
	dir := t.TempDir()
	write := func(name, content string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	write("services.json", `{"apiVersion": "v1", "kind": "ServiceList", "items": [{"metadata": {"name": "a"}, "spec": {"clusterIP": "10.0.0.1",
		"ports": [{"port": 80}]}}]}`)
	write("all.yaml", "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Node, metadata: {name: node-a}}\n"+
		"- {apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: a-1, labels: {kubernetes.io/service-name: a}},\n"+
		"   addressType: IPv4, ports: [{port: 80}], endpoints: [{addresses: [10.1.0.1]}]}\n"+
		"---\n---\napiVersion: example.com/v1\nkind: Other\nmetadata: {name: x}\n---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\n")
	write("notes.txt", "no manifest")
	e := run(t, Options{Manifests: dir, Watch: time.Minute, FlipsPerSecond: 1, Servers: 1})
	require.EqualValues(t, 1, value(t, e, "nodes"))
	require.EqualValues(t, 1, value(t, e, "services"))
	require.EqualValues(t, 1, value(t, e, "endpoints"))
	require.EqualValues(t, 60, value(t, e, "updates"))

	require.NotContains(t, strings.Join(e.Assumptions, "\n"), "left out")

	// The estimate names a file that cannot be read, and Services that have only Endpoints objects,
	// and counts everything else.
	write("another.yaml", "apiVersion: v1\nkind: [")
	endpoints := "---\n{apiVersion: v1, kind: Endpoints, metadata: {name: %s}}\n"
	write("endpoints.yml", fmt.Sprintf(endpoints+endpoints, "a", "b"))
	e = run(t, Options{Manifests: dir, Watch: time.Minute, FlipsPerSecond: 1, Servers: 1})
	require.EqualValues(t, 1, value(t, e, "endpoints"))
	remarks := strings.Join(e.Assumptions, "\n")
	require.Contains(t, remarks, "another.yaml: ")
	require.Contains(t, remarks, "1 Endpoints objects whose Services have no EndpointSlice in the files are left out, such as default/b")

	require.NoError(t, os.Remove(filepath.Join(dir, "services.json")))
	require.NoError(t, os.Remove(filepath.Join(dir, "all.yaml")))
	_, err := Run(t.Context(), Options{Manifests: dir, Watch: time.Minute, Servers: 1}, progress.New(new(bytes.Buffer)))
	require.ErrorContains(t, err, "another.yaml: ")
}

// TestSelectors uses manifests of objects that kube-proxy's selectors leave out.
func TestSelectors(t *testing.T) {
	dir := t.TempDir()
	service := func(name, labels, clusterIP string) string {
		return fmt.Sprintf("---\n{apiVersion: v1, kind: Service, metadata: {name: %s, labels: {%s}}, spec: {clusterIP: %s, ports: [{port: 80}]}}\n", name, labels, clusterIP)
	}
	slice := func(name, service, labels string) string {
		return fmt.Sprintf("---\n{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: %s, labels: {kubernetes.io/service-name: %s%s}},\n"+
			"  addressType: IPv4, ports: [{port: 80}], endpoints: [{addresses: [10.1.0.1]}]}\n", name, service, labels)
	}
	write := func(content string) Options {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "all.yaml"), []byte(content), 0o600))
		return Options{Manifests: dir, Watch: time.Minute, FlipsPerSecond: 1, Nodes: 1, Servers: 1}
	}
	const headless, foreign = "service.kubernetes.io/headless: ''", "service.kubernetes.io/service-proxy-name: other"
	served := service("web", "", "10.0.0.1") + slice("web-1", "web", "")
	want := run(t, write(served))
	have := run(t, write(served+service("db", headless, "None")+slice("db-1", "db", ", "+headless)+service("none", "", "None")+
		service("mesh", foreign, "10.0.0.2")))
	for _, name := range []string{"services", "slices", "endpoints", "cold-bytes-today", "node-bytes-today", "node-bytes-slicecast"} {
		require.InDelta(t, value(t, want, name), value(t, have, name), 1e-9, name)
	}
	marked := run(t, write(served+service("marked", headless, "10.0.0.3")))
	require.EqualValues(t, 2, value(t, marked, "services"), "the label of slices of headless Services has no effect on a Service")
	with := run(t, write(served+slice("mesh-1", "mesh", ", "+foreign)))
	require.Greater(t, value(t, with, "cold-bytes-today"), value(t, want, "cold-bytes-today"), "slices of other proxies' Services are sent")

	o := write(service("mesh", foreign, "10.0.0.2") + served)
	o.ServiceProxyName = "other"
	require.EqualValues(t, 1, value(t, run(t, o), "services"))

	_, err := Run(t.Context(), write(service("db", headless, "None")), progress.New(new(bytes.Buffer)))
	require.ErrorContains(t, err, "that nodes receive")
}

// TestCosts uses reports with made-up figures.
func TestCosts(t *testing.T) {
	m, err := performance.CheckedIn()
	require.NoError(t, err)
	add := func(name string, bytes, server float64) {
		r := *m.Reports[name]
		r.Summary = maps.Clone(r.Summary)
		r.Summary["bytes-per-update"] = report.Spread{Unit: report.Bytes, Median: bytes}
		r.Summary["cpu-per-update"] = report.Spread{Unit: report.Micros, Median: server}
		m.Reports[name] = &r
	}
	costsOf := func(nodes float64) *costs {
		c, err := measuredCosts(m, nodes, nodes)
		require.NoError(t, err)
		return c
	}
	add(apiServerNodeReport, 15_000, 5000)
	add(smallWritesReport, 1000, 8000)
	add(largeWritesReport, 15_000, 6000)
	add(smallEventsReport, 1000, 28+8)
	add("apiserver-steady-100", 15_000, 140+60)
	add("apiserver-steady-1000", 15_000, 70+6)
	add("apiserver-steady-3000", 15_000, 35+2)
	c := costsOf(1000)
	require.InDelta(t, 5000, c.write.value, 0)
	require.InDelta(t, 28, c.eventMicros(300), 1e-9, "not below the smallest event")
	require.InDelta(t, 28, c.eventMicros(1000), 1e-9)
	require.InDelta(t, 49, c.eventMicros(8000), 1e-9)
	require.InDelta(t, 70, c.eventMicros(15_000), 1e-9)
	require.InDelta(t, 112, c.eventMicros(29_000), 1e-9)
	require.Contains(t, c.update.source, "/steady-1000.json")
	require.InDelta(t, 140, costsOf(1).eventMicros(15_000), 1e-9)
	require.InDelta(t, 56, costsOf(300).eventMicros(1000), 1e-9, "300 is nearer to 100 than to 1000 by factor")
	c = costsOf(100_000)
	require.InDelta(t, 14, c.eventMicros(1000), 1e-9)
	require.Contains(t, c.update.source, "/steady-3000.json")
	require.Contains(t, c.eventText(), "35.0 µs for an event of 14.6 KiB")
	add(smallEventsReport, 1000, 80+8) // large events that cost less than small ones
	require.InDelta(t, 80, costsOf(1000).eventMicros(29_000), 1e-9)

	c = costsOf(1000)
	c.smallState.Endpoints, c.smallState.Services, c.smallState.value = 1000, 10, 30_000+1000*20+10*5
	c.largeState.Endpoints, c.largeState.Services, c.largeState.value = 11_000, 100, 30_000+11_000*20+100*5
	c.manyServices.Endpoints, c.manyServices.Services, c.manyServices.value = 10_000, 2000, 30_000+10_000*20+2000*5
	empty, endpoint, service := c.stateBytes()
	require.InDelta(t, 30_000, empty, 1e-6)
	require.InDelta(t, 20, endpoint, 1e-9)
	require.InDelta(t, 5, service, 1e-9)

	for _, name := range []string{"headline-1000", "steady-3000"} {
		delete(m.Reports, name)
		_, err = measuredCosts(m, 1, 1)
		require.ErrorContains(t, err, "there is no report "+name)
	}
}

// TestEstimatesMatchReports estimates clusters with the nodes and events of reports. The results
// must match what the reports measured.
func TestEstimatesMatchReports(t *testing.T) {
	m, err := performance.CheckedIn()
	require.NoError(t, err)
	// The map leads from a report to estimate to the report of its writes, if there is one.
	for name, writes := range map[string]string{
		"steady-100": "", "steady-1000": "", "steady-3000": "",
		"apiserver-steady-100": largeWritesReport, "apiserver-steady-1000": largeWritesReport, "apiserver-steady-3000": largeWritesReport,
		smallEventsReport: smallWritesReport,
	} {
		r := m.Reports[name]
		i := slices.IndexFunc(r.Repeats[0].Phases, func(p report.Phase) bool { return p.Kind == report.Changes })
		p := &r.Repeats[0].Phases[i]
		c, err := newCount("")
		require.NoError(t, err)
		require.NoError(t, c.begun())
		c.seconds = p.Seconds
		c.objects.endpoints, c.objects.services = r.Repeats[0].State.Endpoints, r.Repeats[0].State.Services
		c.slices = flow{events: p.Changes, today: int(float64(p.Changes) * r.Summary["bytes-per-update"].Median), updates: p.Changes}
		e := &Estimate{}
		e.Sections, e.Assumptions, err = conclude(m, c, r.Nodes, 1, 1)
		require.NoError(t, err)
		measured := r.Summary["server-cores"].Median
		if writes == "" {
			memory := r.Summary["resident-state"].Median + float64(r.Nodes)*r.Summary["resident-per-node"].Median
			require.InEpsilon(t, memory, value(t, e, "server-memory-slicecast"), 0.05, name)
			// The servers of the report generate their state.
			generated := value(t, e, "all-cores-slicecast") - value(t, e, "watch-cores-slicecast")
			require.InEpsilon(t, measured, generated, 0.1, name)
			continue
		}
		one, err := m.Figure(writes, "cpu-per-update")
		require.NoError(t, err)
		write, err := m.Figure(apiServerNodeReport, "cpu-per-update")
		require.NoError(t, err)
		// This is what an API server does without changes.
		besides := (one.Median - write.Median) * perMicro * float64(p.Changes) / p.Seconds
		require.InEpsilon(t, measured-besides, value(t, e, "all-cores-today"), 0.1, name)
	}
}

func TestInvalidOptions(t *testing.T) {
	good := Options{Manifests: examples, Watch: time.Minute, Servers: 1}
	for message, change := range map[string]func(*Options){
		"use one of them":             func(o *Options) { o.Kubeconfig = "x" },
		"--watch is 0s":               func(o *Options) { o.Watch = 0 },
		"--flips-per-second is -1":    func(o *Options) { o.FlipsPerSecond = -1 },
		"requires --manifests":        func(o *Options) { o.Manifests, o.FlipsPerSecond = "", 1 },
		"--nodes is -1":               func(o *Options) { o.Nodes = -1 },
		"--api-servers is -1":         func(o *Options) { o.APIServers = -1 },
		"--servers is 0":              func(o *Options) { o.Servers = 0 },
		"no such file":                func(o *Options) { o.Manifests = "/no/such/directory" },
		"no Service or EndpointSlice": func(o *Options) { o.Manifests = t.TempDir() },
		"kubeconfig /no/such/file: ":  func(o *Options) { o.Manifests, o.Kubeconfig = "", "/no/such/file" },
	} {
		o := good
		change(&o)
		_, err := Run(t.Context(), o, progress.New(new(bytes.Buffer)))
		require.ErrorContains(t, err, message)
	}
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "a.yaml"), []byte("{apiVersion: v1, kind: Service, metadata: {name: a}}"), 0o600))
	_, err := Run(t.Context(), Options{Manifests: dir, Watch: time.Minute, Servers: 1}, progress.New(new(bytes.Buffer)))
	require.ErrorContains(t, err, "use --nodes")
}

// slice returns an EndpointSlice as a controller writes it.
func slice(endpoints int) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "web-abcde", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(8080)), Protocol: new(corev1.ProtocolTCP)}},
	}
	for i := range endpoints {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{fmt.Sprintf("10.1.0.%d", i+1)},
			Conditions: discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
			NodeName:   new(fmt.Sprintf("node-%05d", i)),
		})
	}
	return s
}

// TestIrrelevantEvents counts events that the API server sends to nodes and Slicecast does not.
func TestIrrelevantEvents(t *testing.T) {
	c, err := newCount("")
	require.NoError(t, err)
	s := slice(3)
	require.NoError(t, c.begin(s))
	require.NoError(t, c.begun())
	s.Labels["team"] = "a"
	require.NoError(t, c.event(watch.Modified, s))
	require.Equal(t, 1, c.slices.events)
	require.Positive(t, c.slices.today)
	require.Zero(t, c.slices.updates)

	other := slice(2)
	other.Name = "web-fghij"
	require.NoError(t, c.event(watch.Added, other))
	require.Equal(t, 1, c.slices.updates)
	c.end()
	require.Equal(t, 5, c.objects.endpoints)
	require.NoError(t, c.event(watch.Deleted, s))
	require.NoError(t, c.event(watch.Modified, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "headless"}, Spec: corev1.ServiceSpec{ClusterIP: "None"}}))
	require.Equal(t, 2, c.slices.updates)
	require.Equal(t, 1, c.services.events)
	require.Zero(t, c.services.updates)
	c.end()
	require.Equal(t, flow{events: 1, today: c.services.today}, c.services)
}

func TestHeapOf(t *testing.T) {
	n, err := heapOf(func() ([]byte, error) { return make([]byte, 8<<20), nil })
	require.NoError(t, err)
	require.InDelta(t, 8<<20, n, 1<<20)
	_, err = heapOf(func() ([]byte, error) { return nil, os.ErrInvalid })
	require.ErrorIs(t, err, os.ErrInvalid)
}

func TestOnConnection(t *testing.T) {
	require.Equal(t, 100+31, onConnection(100))
	require.Equal(t, 16<<10+31, onConnection(16<<10))
	require.Equal(t, 16<<10+1+62, onConnection(16<<10+1))
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Run(ctx, Options{Manifests: examples, Watch: time.Minute, FlipsPerSecond: 1, Nodes: 1, Servers: 1}, progress.New(new(bytes.Buffer)))
	require.ErrorIs(t, err, context.Canceled)
}
