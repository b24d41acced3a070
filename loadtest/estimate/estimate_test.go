package estimate

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/slicecast/slicecast/loadtest/progress"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const examples = "../../examples"

func run(t *testing.T, o Options) *Estimate {
	t.Helper()
	e, err := Run(t.Context(), o, progress.New(new(bytes.Buffer)))
	require.NoError(t, err)
	return e
}

// value gives a figure that must be there.
func value(t *testing.T, e *Estimate, name string) float64 {
	t.Helper()
	v, ok := e.Value(name)
	require.True(t, ok, name)
	return v
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
	require.EqualValues(t, seconds*perSecond, v("updates"), "each flip by itself")

	flip := v("node-bytes-slicecast") / perSecond
	require.Greater(t, flip, 60., "a name, two versions and a condition")
	require.Less(t, flip, 200.)
	require.Greater(t, v("node-bytes-today"), 10*v("node-bytes-slicecast"), "slices of 100 are sent whole")
	require.InEpsilon(t, nodes*v("node-bytes-today"), v("all-bytes-today"), 1e-9)
	require.InEpsilon(t, v("all-bytes-today")/3, v("api-server-bytes-today"), 1e-9)
	require.InEpsilon(t, nodes*v("node-bytes-slicecast"), v("all-bytes-slicecast"), 1e-9)
	require.InEpsilon(t, 2*v("node-bytes-today"), v("all-bytes-api-server-slicecast"), 1e-9)
	coefficient, err := measured(apiServerReport, "cpu-per-update")
	require.NoError(t, err)
	require.InEpsilon(t, perSecond*nodes*coefficient.value/1e6, v("all-cores-today"), 1e-9)
	require.Less(t, v("cold-bytes-slicecast"), v("cold-bytes-today"))
	require.Less(t, v("cold-list-bytes-today"), v("cold-bytes-today"))
	require.Greater(t, v("cold-list-bytes-today"), 500.)

	var text, twice strings.Builder
	require.NoError(t, e.WriteText(&text))
	require.Contains(t, text.String(), "/ 600 s")
	require.Contains(t, text.String(), "5 endpoints a second flip (--flips-per-second)")
	require.Contains(t, text.String(), coefficient.source)
	for _, s := range e.Sections[1:] {
		for _, l := range s.Lines {
			require.NotEmpty(t, l.Arithmetic, l.Name)
		}
	}
	var parsed Estimate
	var out bytes.Buffer
	require.NoError(t, e.WriteJSON(&out))
	require.NoError(t, json.Unmarshal(out.Bytes(), &parsed))
	require.Equal(t, Schema, parsed.Schema)
	require.NoError(t, parsed.WriteText(&twice))
	require.Equal(t, text.String(), twice.String())
}

func TestQuietCluster(t *testing.T) {
	e := run(t, Options{Manifests: examples, Watch: time.Minute, Servers: 2})
	require.Greater(t, value(t, e, "nodes"), 0., "those of the manifests")
	require.EqualValues(t, 1, value(t, e, "api-servers"))
	require.Zero(t, value(t, e, "all-cores-today"))
	require.Greater(t, value(t, e, "node-bytes-today"), 0., "bookmarks")
	require.Greater(t, value(t, e, "node-bytes-slicecast"), 0., "heartbeats")
}

func TestManifestsAsKubectlWritesThem(t *testing.T) {
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

	write("all.yaml", "apiVersion: v1\nkind: [")
	_, err := Run(t.Context(), Options{Manifests: dir, Watch: time.Minute, Servers: 1}, progress.New(new(bytes.Buffer)))
	require.ErrorContains(t, err, "all.yaml: ")
}

func TestOptionsSayWhatIsWrong(t *testing.T) {
	good := Options{Manifests: examples, Watch: time.Minute, Servers: 1}
	for message, change := range map[string]func(*Options){
		"use one of them":                 func(o *Options) { o.Kubeconfig = "x" },
		"--watch is 0s":                   func(o *Options) { o.Watch = 0 },
		"--flips-per-second is -1":        func(o *Options) { o.FlipsPerSecond = -1 },
		"a cluster tells by itself":       func(o *Options) { o.Manifests, o.FlipsPerSecond = "", 1 },
		"--nodes is -1":                   func(o *Options) { o.Nodes = -1 },
		"--api-servers is -1":             func(o *Options) { o.APIServers = -1 },
		"--servers is 0":                  func(o *Options) { o.Servers = 0 },
		"no such file":                    func(o *Options) { o.Manifests = "/no/such/directory" },
		"no Service and no EndpointSlice": func(o *Options) { o.Manifests = t.TempDir() },
		"kubeconfig: ":                    func(o *Options) { o.Manifests, o.Kubeconfig = "", "/no/such/file" },
	} {
		o := good
		change(&o)
		_, err := Run(t.Context(), o, progress.New(new(bytes.Buffer)))
		require.ErrorContains(t, err, message)
	}
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "a.yaml"), []byte("{apiVersion: v1, kind: Service, metadata: {name: a}}"), 0o600))
	_, err := Run(t.Context(), Options{Manifests: dir, Watch: time.Minute, Servers: 1}, progress.New(new(bytes.Buffer)))
	require.ErrorContains(t, err, "give --nodes")
}

// slice gives an EndpointSlice as a controller writes it.
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

// TestEventsThatNodesNeedNotKnow has changes that the API server tells of, and Slicecast does not.
func TestEventsThatNodesNeedNotKnow(t *testing.T) {
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
