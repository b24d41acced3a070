// This file measures for hours whether what a server, an agent and the kernel hold levels off while
// names come that never come back. Tests prove that growth is noticed, and that docs/soak says what
// its samples do.
package kubeproxy

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"text/template"
	"time"

	gnft "github.com/google/nftables"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/command"
	"github.com/slicecast/slicecast/loadtest/report/chart"
	"github.com/slicecast/slicecast/loadtest/usage"
)

const (
	// soakLive is how many of the new Services exist at a time, and soakEndpoints how many
	// endpoints each of them has.
	soakLive, soakEndpoints = 20, 20
	// soakSamples is how often everything is looked at. There are fewer samples if they would be
	// closer than soakClosest, because a look costs CPU time.
	soakSamples = 240
	soakClosest = 5 * time.Second
	// soakReach is the time within which a new Service must be reachable from each node.
	soakReach       = time.Minute
	soakMetricsPort = 8474
)

// soakBound is by how much the median of a figure's last quarter may exceed that of its second
// quarter: by a share of it, and by an absolute value.
type soakBound struct{ share, value float64 }

// soakBounds are the bounds of figures by subject. Subjects without one have that of "". Of what is
// not listed, the kernel may hold no more at all.
var soakBounds = map[string]map[string]soakBound{
	"memory":     {"": {0.05, 4}, "server": {0.1, 0}},
	"heap":       {"": {0, 8}, "server": {0.1, 4}},
	"goroutines": {"": {0, 5}},
	"files":      {"": {0, 5}},
	// Entries of failed attempts to connect stay for a while. The node with iptables has more of
	// them, because its rules take longer to write. Medians of an eighth of the published soak are
	// from 93 to 255 with nftables, and from 2682 to 4374 with iptables-nft.
	"connections": {"": {0.2, 0}, "nftables": {0, 150}},
}

// level reports whether the last quarter is within the figure's bound.
func (r quarters) level() bool {
	bound, ok := soakBounds[r.Figure][r.Subject]
	if !ok {
		bound = soakBounds[r.Figure][""]
	}
	return r.After <= r.Before*(1+bound.share)+bound.value
}

// soakUnits are the figures with a chart, in order, with their units.
var soakUnits = []struct{ figure, unit string }{
	{"memory", "resident memory in MiB"},
	{"heap", "heap in use in MiB"},
	{"goroutines", "goroutines"},
	{"files", "open file descriptors"},
	{"chains", "chains in the kernel"},
	{"sets", "sets and maps in the kernel"},
	{"elements", "elements of sets and maps in the kernel"},
	{"rules", "rules in the kernel"},
	{"connections", "entries of conntrack"},
}

// sample is what was seen at one time: a figure of a subject, such as "memory" of "server", by
// figure and subject.
type sample struct {
	Seconds  float64                       `json:"seconds"`
	Services int                           `json:"services"` // how many new ones there had been
	Figures  map[string]map[string]float64 `json:"figures"`
}

// soakRecord is what a soak was and what was seen, from which its page is made.
type soakRecord struct {
	Size     string      `json:"size"` // as in -kubeproxy.sizes
	Duration string      `json:"duration"`
	Pause    string      `json:"pause"`
	Machine  soakMachine `json:"machine"`
	Services int         `json:"services"` // how many came
	// RemovedEndpoints is how many endpoints each slice had that was removed before the soak.
	RemovedEndpoints int `json:"removedEndpoints"`
	// Slowest is the longest time from a Service's creation until connections succeeded, in
	// seconds, by mode.
	Slowest map[string]float64 `json:"slowest"`
	Samples []sample           `json:"samples"`
}

// soakMachine describes the machine.
type soakMachine struct {
	CPUs   int    `json:"cpus"`
	CPU    string `json:"cpu"`
	Kernel string `json:"kernel"`
}

// soak is a cluster in which names come that never come back.
type soak struct {
	*cluster
	nodes  map[string]*node            // by mode
	agents map[string]*command.Command // by mode
	web    *http.Client                // reads the server's metrics
	began  time.Time
	record soakRecord
}

// BenchmarkSoak runs a server and an agent for each mode, beside -kubeproxy.sizes' first cluster,
// for -kubeproxy.duration. After each -kubeproxy.pause, a Service with a slice of its own comes,
// and an older one goes; in between, a slice is replaced by one of another name. No name and no
// endpoint comes back. Each new Service must be reachable from a pod of each node.
//
// It fails unless the memory, goroutines and file descriptors of all processes, and what is in the
// kernel of the nodes, level off: see soakBounds. It reports the medians of the second and the last
// quarter. With -kubeproxy.soak, it also writes the samples and their curves to that folder.
func BenchmarkSoak(b *testing.B) {
	first, _, _ := strings.Cut(*sizesFlag, ",")
	size, err := parseSize(first)
	require.NoError(b, err)
	s := newSoak(b, first, size)
	next := s.began
	every := max(*durationFlag/soakSamples, soakClosest)
	i := 0
	for ; time.Since(s.began) < *durationFlag; i++ {
		s.churn(b, i)
		if now := time.Now(); !now.Before(next) {
			s.look(b, i)
			next = now.Add(every)
		}
		<-time.After(time.Until(s.began.Add(time.Duration(i+1) * *pauseFlag)))
	}
	for mode, a := range s.agents {
		require.NoError(b, a.Check(), mode)
		b.ReportMetric(1000*s.record.Slowest[mode], mode+"-slowest-ms")
	}
	s.record.Services = i
	b.ReportMetric(float64(i), "services")
	for _, r := range s.record.results() {
		b.ReportMetric(r.Before, fmt.Sprintf("%s-%s-before", r.Subject, r.Figure))
		b.ReportMetric(r.After, fmt.Sprintf("%s-%s-after", r.Subject, r.Figure))
		if !r.Level {
			b.Errorf("%s of %s does not level off: %.1f in the second quarter, %.1f in the last", r.Figure, r.Subject, r.Before, r.After)
		}
	}
	if *soakFlag != "" {
		require.NoError(b, s.record.write(*soakFlag))
	}
}

func newSoak(b *testing.B, sizeText string, size size) *soak {
	b.Helper()
	machine, err := usage.ThisMachine()
	require.NoError(b, err)
	s := &soak{nodes: make(map[string]*node), agents: make(map[string]*command.Command), record: soakRecord{
		Size: sizeText, Duration: fmt.Sprint(*durationFlag), Pause: fmt.Sprint(*pauseFlag),
		Machine:          soakMachine{machine.CPUs, machine.CPU, machine.Kernel},
		RemovedEndpoints: soakEndpoints, Slowest: make(map[string]float64),
	}}
	s.cluster = newCluster(b, size, fmt.Sprint("--metrics-bind-address=:", soakMetricsPort))
	observer := s.control.ConfigFor("soak", "slicecast:observers")
	identity, err := tls.X509KeyPair(observer.CertData, observer.KeyData)
	require.NoError(b, err)
	s.web = &http.Client{Timeout: time.Minute, Transport: &http.Transport{
		DialContext: s.network.World.DialContext, DisableKeepAlives: true,
		TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: s.authority.Pool(), Certificates: []tls.Certificate{identity}},
	}}
	for mode := range strings.SplitSeq(*modesFlag, ",") {
		n := s.addNode(b, "node-"+mode, mode)
		s.nodes[mode], s.agents[mode] = n, s.startSubject(b, slicecast, n)
		n.awaitService(b, s.clusterIP(b, s.ordinary))
	}
	s.fillTombstones(b)
	s.began = time.Now()
	return s
}

// fillTombstones makes the server remember as many removals as it ever will. Otherwise its memory
// would grow for hours, until so many names have gone. The slices have as many endpoints as those
// of the soak, because the store's trees keep some older versions of what they hold.
func (s *soak) fillTombstones(b *testing.B) {
	b.Helper()
	const most = store.DefaultShards * store.DefaultTombstones
	const gone = most * 5 / 4 // shards get different numbers
	const together = gone / 10
	api := s.control.Client().DiscoveryV1().EndpointSlices(namespace)
	each := func(first int, do func(i int, name string) error) {
		var all errgroup.Group
		all.SetLimit(16)
		for i := first; i < first+together; i++ {
			all.Go(func() error { return do(i, fmt.Sprintf("gone-%06d", i)) })
		}
		require.NoError(b, all.Wait())
	}
	for first := 0; first < gone; first += together {
		fmt.Fprintf(os.Stderr, "before the soak, %d of %d slices came and went\n", first, gone)
		each(first, func(i int, name string) error {
			_, err := api.Create(b.Context(), s.slice(name, name, i), metav1.CreateOptions{})
			return err
		})
		each(first, func(_ int, name string) error { return api.Delete(b.Context(), name, metav1.DeleteOptions{}) })
	}
	ctx, cancel := context.WithTimeout(b.Context(), 10*time.Minute)
	defer cancel()
	require.NoError(b, testenv.WaitFor(ctx, func() error {
		values, err := metricsAt(ctx, s.web, s.serverMetrics())
		if have := values["slicecast_server_tombstones"]; err == nil && have < most {
			err = fmt.Errorf("the server remembers %.0f of %d removals", have, most)
		}
		return err
	}))
}

// slice returns a slice of a Service with the endpoints of number n.
func (s *soak) slice(name, service string, n int) *discoveryv1.EndpointSlice {
	slice := s.first.DeepCopy()
	slice.ObjectMeta = metav1.ObjectMeta{
		Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: service, discoveryv1.LabelManagedBy: "soak"},
	}
	slice.Endpoints = nil
	for e := range soakEndpoints {
		// The addresses of the cluster's own endpoints are below these.
		n := n*soakEndpoints + e
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{netip.AddrFrom4([4]byte{100, 96 + byte(n>>16&0x1f), byte(n >> 8), byte(n)}).String()},
			Conditions: discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
		})
	}
	return slice
}

func (s *soak) serverMetrics() string {
	return fmt.Sprintf("https://%s:%d/metrics", s.network.World.IPv4, soakMetricsPort)
}

// churn creates the Service of number i and its slice, replaces the slice of an older Service, and
// deletes the oldest one. Then it waits until the new one is reachable from all nodes.
func (s *soak) churn(b *testing.B, i int) {
	b.Helper()
	services, slices := s.control.Client().CoreV1().Services(namespace), s.control.Client().DiscoveryV1().EndpointSlices(namespace)
	name := func(i int) string { return fmt.Sprintf("soak-%07d", i) }
	create := func(i int, generation string) {
		_, err := slices.Create(b.Context(), s.slice(name(i)+generation, name(i), i*2+map[string]int{"a": 0, "b": 1}[generation]), metav1.CreateOptions{})
		require.NoError(b, err)
	}
	remove := func(i int, generation string) {
		require.NoError(b, slices.Delete(b.Context(), name(i)+generation, metav1.DeleteOptions{}))
	}
	began := time.Now()
	service, err := services.Create(b.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name(i)}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80}}},
	}, metav1.CreateOptions{})
	require.NoError(b, err)
	create(i, "a")
	if old := i - soakLive/2; old >= 0 {
		create(old, "b")
		remove(old, "a")
	}
	if old := i - soakLive; old >= 0 {
		require.NoError(b, services.Delete(b.Context(), name(old), metav1.DeleteOptions{}))
		remove(old, "b")
	}
	to := netip.AddrPortFrom(netip.MustParseAddr(service.Spec.ClusterIP), 80)
	for mode, n := range s.nodes {
		ctx, cancel := context.WithTimeout(b.Context(), soakReach)
		err := testenv.WaitFor(ctx, func() error {
			_, err := n.dial(to, 1, 20*time.Millisecond)
			return err
		})
		cancel()
		require.NoError(b, err, "%s is not reachable with %s", name(i), mode)
		s.record.Slowest[mode] = max(s.record.Slowest[mode], time.Since(began).Round(time.Millisecond).Seconds())
	}
}

// look adds a sample.
func (s *soak) look(b *testing.B, services int) {
	b.Helper()
	now := sample{Seconds: time.Since(s.began).Seconds(), Services: services, Figures: make(map[string]map[string]float64)}
	add := func(figure, subject string, value float64) {
		if now.Figures[figure] == nil {
			now.Figures[figure] = make(map[string]float64)
		}
		now.Figures[figure][subject] = value
	}
	process := func(subject string, web *http.Client, url string) {
		values, err := metricsAt(b.Context(), web, url)
		require.NoError(b, err)
		add("memory", subject, values["process_resident_memory_bytes"]/(1<<20))
		add("heap", subject, values["go_memstats_heap_inuse_bytes"]/(1<<20))
		add("goroutines", subject, values["go_goroutines"])
		add("files", subject, values["process_open_fds"])
	}
	process("server", s.web, s.serverMetrics())
	for mode, n := range s.nodes {
		web := &http.Client{Timeout: time.Minute, Transport: &http.Transport{DialContext: n.DialContext, DisableKeepAlives: true}}
		process(mode, web, "http://127.0.0.1:10249/metrics")
		for figure, value := range n.inKernel(b) {
			add(figure, mode, value)
		}
	}
	s.record.Samples = append(s.record.Samples, now)
	fmt.Fprintf(os.Stderr, "%6.0fs  %d Services came and went  %s\n", now.Seconds, services, now)
}

// String returns the figures of processes.
func (s sample) String() string {
	var words []string
	for _, figure := range []string{"memory", "goroutines", "files"} {
		for _, subject := range slices.Sorted(maps.Keys(s.Figures[figure])) {
			words = append(words, fmt.Sprintf("%s.%s=%.0f", subject, figure, s.Figures[figure][subject]))
		}
	}
	return strings.Join(words, " ")
}

// metricsAt returns the metrics without labels that a process serves.
func metricsAt(ctx context.Context, web *http.Client, url string) (map[string]float64, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	answer, err := web.Do(request)
	if err != nil {
		return nil, err
	}
	defer func() { _ = answer.Body.Close() }()
	if answer.StatusCode != http.StatusOK {
		text, err := io.ReadAll(io.LimitReader(answer.Body, 1<<10))
		return nil, fmt.Errorf("%s: %s: %s %w", url, answer.Status, text, err)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(answer.Body)
	out := make(map[string]float64)
	for name, f := range families {
		for _, m := range f.GetMetric() {
			if len(m.GetLabel()) == 0 {
				out[name] = cmp.Or(m.GetGauge().GetValue(), m.GetCounter().GetValue(), m.GetUntyped().GetValue())
			}
		}
	}
	return out, err
}

// inKernel returns how much a node's kernel holds.
func (n *node) inKernel(b *testing.B) map[string]float64 {
	b.Helper()
	out := make(map[string]float64)
	count, err := n.Run(b.Context(), "cat", "/proc/sys/net/netfilter/nf_conntrack_count")
	require.NoError(b, err)
	out["connections"], err = strconv.ParseFloat(strings.TrimSpace(count), 64)
	require.NoError(b, err)
	if n.iptables != "" {
		for _, table := range []string{"nat", "filter"} {
			text, err := n.Run(b.Context(), "iptables-"+n.iptables+"-save", "-t", table)
			require.NoError(b, err)
			out["chains"] += float64(strings.Count(text, "\n:"))
			out["rules"] += float64(strings.Count(text, "\n-A "))
		}
		return out
	}
	require.NoError(b, n.Do(func() error {
		conn, err := gnft.New()
		if err != nil {
			return err
		}
		tables, err := conn.ListTables()
		if err != nil {
			return err
		}
		chains, err := conn.ListChains()
		if err != nil {
			return err
		}
		out["chains"] = float64(len(chains))
		for _, t := range tables {
			sets, err := conn.GetSets(t)
			if err != nil {
				return err
			}
			out["sets"] += float64(len(sets))
			for _, s := range sets {
				elements, err := conn.GetSetElements(s)
				if err != nil {
					return err
				}
				out["elements"] += float64(len(elements))
			}
		}
		return nil
	}))
	return out
}

// quarters is how a figure of a subject developed: its median in the second and in the last
// quarter.
type quarters struct {
	Figure, Subject string
	Before, After   float64
	Level           bool
}

func (r *soakRecord) results() (out []quarters) {
	quarter := len(r.Samples) / 4
	median := func(samples []sample, figure, subject string) float64 {
		var values []float64
		for _, s := range samples {
			values = append(values, s.Figures[figure][subject])
		}
		slices.Sort(values)
		return values[len(values)/2]
	}
	last := r.Samples[len(r.Samples)-1]
	for _, u := range soakUnits {
		for _, subject := range slices.Sorted(maps.Keys(last.Figures[u.figure])) {
			q := quarters{Figure: u.figure, Subject: subject}
			q.Before = median(r.Samples[quarter:max(2*quarter, quarter+1)], u.figure, subject)
			q.After = median(r.Samples[len(r.Samples)-max(quarter, 1):], u.figure, subject)
			q.Level = q.level()
			out = append(out, q)
		}
	}
	return out
}

// serverMemory returns the server's resident memory at the first sample and the median of the last
// quarter, in MiB, and how many Services had come when it first reached that median.
func (r *soakRecord) serverMemory() (first, last float64, reached int) {
	first = r.Samples[0].Figures["memory"]["server"]
	for _, q := range r.results() {
		if q.Figure == "memory" && q.Subject == "server" {
			last = q.After
		}
	}
	i := slices.IndexFunc(r.Samples, func(s sample) bool { return s.Figures["memory"]["server"] >= last })
	return first, last, r.Samples[i].Services
}

// soakPage is the page of the documentation.
var soakPage = template.Must(template.New("soak").Parse(`# What levels off

<!-- Written by make soak. -->

A server, and an agent for each mode of a node, ran for {{printf "%.0f" .Minutes}} minutes beside a real API server with
{{.SizeServices}} Services of {{.Size}} endpoints. Meanwhile {{.Services}} Services, {{.Slices}} slices and {{.Endpoints}} endpoints came that never
came back; {{.Live}} of these Services existed at a time. Each new Service was reached from a pod of each node. If all is
well, what processes and kernels hold depends on what exists, not on what has been. Two things are bounded otherwise:

- A server remembers the last removals, {{.Remembered}} of all its shards together. So many slices came and went before the
  soak. Each had {{.RemovedEndpoints}} endpoints{{if ne .RemovedEndpoints .NowRemovedEndpoints}}; the command now uses slices of {{.NowRemovedEndpoints}}{{end}}.
- The server's trees [hold older entries for a while](../design/store.md#invariants). The server's memory was
  {{printf "%.0f" .FirstMemory}} MiB at first, and reached {{printf "%.0f" .LastMemory}} MiB, the median of the last quarter, when {{.Reached}} Services had come.

` + "```sh\nmake soak DURATION={{.Duration}} PAUSE={{.Pause}}\n```" + `

The machine has {{.Machine.CPUs}} CPUs ({{.Machine.CPU}}), which the API server and etcd share, and Linux {{.Machine.Kernel}}.

A figure is level if the median of the last quarter exceeds that of the second quarter by no more than its bound: see
` + "`soakBounds` in [`loadtest/kubeproxy`](../../loadtest/kubeproxy/soak_test.go)." + `

| figure | of | second quarter, median | last quarter, median | |
| --- | --- | --- | --- | --- |
{{- range .Results}}
| {{.Figure}} | {{.Subject}} | {{printf "%.0f" .Before}} | {{printf "%.0f" .After}} | {{if .Level}}level{{else}}**grows**{{end}} |
{{- end}}

From the request to the API server until a connection to the new Service succeeded, it never lasted longer than:
{{range .Slowest}}
- {{.}}
{{- end}}
{{range .Figures}}
## {{.Unit}}

![{{.Unit}} over the minutes]({{.Name}}.svg)
{{end}}`))

// files returns the record itself, a chart for each figure, and the page that shows them.
func (r *soakRecord) files() (map[string][]byte, error) {
	text, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	size, err := parseSize(r.Size)
	if err != nil {
		return nil, err
	}
	type figure struct{ Name, Unit string }
	var figures []figure
	files := map[string][]byte{"samples.json": append(text, '\n')}
	for _, u := range soakUnits {
		if svg := r.chart(u.figure, u.unit); svg != "" {
			files[u.figure+".svg"] = []byte(svg)
			figures = append(figures, figure{u.figure, u.unit})
		}
	}
	var slowest []string
	for _, mode := range slices.Sorted(maps.Keys(r.Slowest)) {
		slowest = append(slowest, fmt.Sprintf("%.2f s with %s", r.Slowest[mode], mode))
	}
	first, last, reached := r.serverMemory()
	var page bytes.Buffer
	err = soakPage.Execute(&page, map[string]any{
		"Minutes": r.Samples[len(r.Samples)-1].Seconds / 60, "Machine": r.Machine,
		"Services": r.Services, "Slices": 2 * r.Services, "Endpoints": 2 * r.Services * soakEndpoints,
		"Size": size.services*size.endpoints + size.large, "SizeServices": size.services + min(size.large, 1),
		"Results": r.results(), "Figures": figures, "Slowest": slowest, "Live": soakLive,
		"Duration": r.Duration, "Pause": r.Pause, "Remembered": store.DefaultShards * store.DefaultTombstones,
		"RemovedEndpoints": r.RemovedEndpoints, "NowRemovedEndpoints": soakEndpoints,
		"FirstMemory": first, "LastMemory": last, "Reached": reached,
	})
	files["README.md"] = page.Bytes()
	return files, err
}

// write writes the files to a directory.
func (r *soakRecord) write(dir string) error {
	files, err := r.files()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// chart returns the curves of a figure, or "" if nothing has it.
func (r *soakRecord) chart(figure, unit string) string {
	c := chart.Lines{
		Head: chart.Head{ID: figure, Title: unit, Text: unit + " over the minutes of the soak"},
		X:    chart.Axis{Title: "minutes", Format: plain}, Y: chart.Axis{Title: unit, Format: plain},
	}
	lines := make(map[string]*chart.Line)
	for _, at := range r.Samples {
		for subject, value := range at.Figures[figure] {
			if lines[subject] == nil {
				lines[subject] = &chart.Line{Name: subject}
			}
			lines[subject].Points = append(lines[subject].Points, chart.Point{X: at.Seconds / 60, Y: value})
		}
	}
	if len(lines) == 0 {
		return ""
	}
	for _, subject := range slices.Sorted(maps.Keys(lines)) {
		c.Lines = append(c.Lines, *lines[subject])
	}
	return chart.File(c.SVG())
}

func plain(v float64) string { return strconv.FormatFloat(v, 'g', 6, 64) }

// soakRecorded returns what the documentation shows.
func soakRecorded(t *testing.T) *soakRecord {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(soakDocs, "samples.json"))
	require.NoError(t, err)
	r := new(soakRecord)
	require.NoError(t, json.Unmarshal(text, r))
	return r
}

const soakDocs = "../../docs/soak"

// TestSoakPageIsCurrent holds the page and its curves to the samples. If the page's text has to
// change, change soakPage, and run this test with -kubeproxy.soak of an absolute path of docs/soak.
func TestSoakPageIsCurrent(t *testing.T) {
	r := soakRecorded(t)
	if *soakFlag != "" {
		require.NoError(t, r.write(*soakFlag))
	}
	files, err := r.files()
	require.NoError(t, err)
	for name, want := range files {
		have, err := os.ReadFile(filepath.Join(soakDocs, name))
		require.NoError(t, err)
		require.Equal(t, string(want), string(have), name)
	}
	for _, q := range r.results() {
		require.True(t, q.Level, "%+v", q)
	}
}

// TestSoakNoticesGrowth adds to each figure of each subject, in the last quarter, as much as a leak
// would have left by then.
func TestSoakNoticesGrowth(t *testing.T) {
	leaked := map[string]float64{
		"memory": 25, "heap": 25, "goroutines": 20, "files": 20, "chains": 1, "sets": 1, "elements": 1, "rules": 1, "connections": 1000,
	}
	results := soakRecorded(t).results()
	require.Len(t, results, 19)
	for _, q := range results {
		q.After = q.Before + leaked[q.Figure]
		require.False(t, q.level(), "%+v", q)
	}
}
