// These tests prove that runs against real API servers, one's own or an existing one, measure what
// was sent and write only to the namespace that they were allowed. They also prove that an
// interrupted run leaves nothing behind.
package app

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
	"github.com/slicecast/slicecast/loadtest/child"
	"github.com/slicecast/slicecast/loadtest/engine"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/scenario"
	"github.com/slicecast/slicecast/loadtest/worker"
)

// TestExistingCluster runs against the API server of an existing cluster that has Services already,
// and checks that runs write only to the namespace of --write-namespace.
func TestExistingCluster(t *testing.T) {
	cp := controlplane.Start(t, controlplane.Options{Controllers: true})
	kubeconfig := "--kube-apiserver=" + cp.Kubeconfig(t, cp.AdminConfig())
	theirs := cp.Namespace(t)
	change := makeSlice(t, cp, theirs)
	changing := func(t *testing.T, pause time.Duration) {
		ended := make(chan error, 1)
		go func() { ended <- change(t.Context(), pause) }()
		t.Cleanup(func() { require.ErrorIs(t, <-ended, context.Canceled) })
	}
	ownState := func() (out []string) {
		all, err := cp.Client().DiscoveryV1().EndpointSlices("").List(t.Context(), metav1.ListOptions{})
		require.NoError(t, err)
		for _, s := range all.Items {
			out = append(out, s.Namespace+"/"+s.Name)
		}
		return out
	}
	before := ownState()

	peers := map[string]report.Peer{"watchers": report.KubeAPIServer, "slicecast": report.Slicecast}
	for name, peer := range peers {
		t.Run("observed by "+name, func(t *testing.T) {
			changing(t, 100*time.Millisecond)
			r := run(t, peer, "--nodes=3", "--duration=2s", kubeconfig)
			changes := r.Repeats[0].Phases[1]
			require.Greater(t, changes.Latency.Count, int64(3))
			require.Zero(t, changes.Changes, "the number of changes is unknown")
			require.Equal(t, before, ownState(), "the run wrote to the cluster")
			require.Contains(t, r.Notes[0], "last-change-trigger-time")
			require.Equal(t, 3, r.Repeats[0].Check.Nodes)
			require.Equal(t, "observed", r.Scenario.Name)
			require.Contains(t, r.Scenario.Parameters, "duration")
			require.NotContains(t, r.Scenario.Parameters, "rate", "the run does not choose the rate")
			if peer == report.KubeAPIServer {
				require.Positive(t, changes.ServerCPU.Total(), "the API server reports it")
				require.Contains(t, r.Summary, "cpu-per-update")
				require.NotContains(t, r.Summary, "cpu-user-per-update", "the API server reports only the total")
				require.Contains(t, strings.Join(r.Repeats[0].Notes, "\n"), "is from its metrics")
			}
		})
	}
	t.Run("observed without permission to read metrics", func(t *testing.T) {
		user := "--kube-apiserver=" + cp.Kubeconfig(t, reader(t, cp))
		r := run(t, report.KubeAPIServer, "--nodes=1", "--duration=100ms", user)
		require.Nil(t, r.Repeats[0].Phases[1].ServerCPU)
		require.Contains(t, strings.Join(r.Repeats[0].Notes, "\n"), "permission to get the non-resource URL /metrics")
	})
	// Both runs use the same namespace, so the second waits until the cluster has removed that of
	// the first. Another Service changes meanwhile.
	const namespace = "loadtest-written"
	for name, peer := range peers {
		t.Run("with a namespace, by "+name, func(t *testing.T) {
			changing(t, time.Millisecond)
			r := run(t, peer, slices.Concat(small, []string{
				"--scenario=rolling-update", "--rate=200", kubeconfig, "--write-namespace=" + namespace, "--nodes-per-process=4",
			})...)
			require.Equal(t, 2, r.Processes)
			changes := r.Repeats[0].Phases[2]
			require.Equal(t, report.Changes, changes.Kind)
			require.Greater(t, changes.Changes, 150)
			require.EqualValues(t, 6*changes.Changes, changes.Latency.Count)
			require.Equal(t, 11, r.Repeats[0].State.Services, "the cluster's own Services belong to another proxy")
		})
	}
	awaitGone(t, cp, namespace)
	require.Equal(t, before, ownState())

	t.Run("the true state is that of the API server", func(t *testing.T) {
		setup := worker.Setup{
			Scenario: scenario.Scenario{Nodes: 2}, Count: 2, Kubeconfig: cp.Kubeconfig(t, cp.AdminConfig()),
			Servers: []string{(&oneShard{service: func(string) *model.Service { return webService(80) }}).serve(t)},
		}
		w, err := child.Start(t.Context(), "worker", os.Stderr, []string{engine.WorkCommand}, (*worker.Worker).Setup, setup)
		require.NoError(t, err)
		defer func() { require.NoError(t, w.Close()) }()
		_, err = child.Call(t.Context(), w, (*worker.Worker).Run, child.None{})
		require.NoError(t, err)
		_, err = child.Call(t.Context(), w, (*worker.Worker).Synced, child.None{})
		require.NoError(t, err)
		checked, err := child.Call(t.Context(), w, (*worker.Worker).Check, 5*time.Second)
		require.NoError(t, err)
		require.Contains(t, checked.Wrong, "Service default/web should not be there", "all nodes agree with the server, which is wrong")
	})

	t.Run("interrupted", func(t *testing.T) {
		c := exec.CommandContext(t.Context(), os.Args[0], slices.Concat([]string{"apiserver"}, small,
			[]string{"--duration=1h", kubeconfig, "--write-namespace=loadtest-interrupted"})...)
		progress := &awaited{want: "changes:", seen: make(chan struct{})}
		c.Stderr = progress
		require.NoError(t, c.Start())
		<-progress.seen
		require.NoError(t, c.Process.Signal(os.Interrupt))
		require.Error(t, c.Wait())
		require.Contains(t, progress.all.String(), "receive the load test's EndpointSlices", "the run should warn before it writes")
		awaitGone(t, cp, "loadtest-interrupted")
	})

	// A terminal sends ^C to the comparison's process group. A comparison that is killed cannot
	// pass on any signal.
	t.Run("comparisons", func(t *testing.T) {
		for name, end := range map[string]func(pid int) error{
			"interrupted": func(pid int) error { return syscall.Kill(-pid, syscall.SIGINT) },
			"killed":      func(pid int) error { return syscall.Kill(pid, syscall.SIGKILL) },
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel() // the cluster takes long to remove a namespace
				namespace := "loadtest-comparison-" + name
				c := exec.CommandContext(t.Context(), os.Args[0], slices.Concat([]string{"compare", "--"}, small,
					[]string{"--duration=1h", kubeconfig, "--write-namespace=" + namespace})...)
				c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
				progress := &awaited{want: "changes:", seen: make(chan struct{})}
				c.Stderr = progress
				require.NoError(t, c.Start())
				<-progress.seen
				require.NoError(t, end(c.Process.Pid))
				require.Error(t, c.Wait())
				awaitGone(t, cp, namespace)
			})
		}
	})

	t.Run("existing namespace", func(t *testing.T) {
		o := options(t, report.KubeAPIServer, append(small, kubeconfig, "--write-namespace="+theirs)...)
		require.ErrorContains(t, Run(t.Context(), o, new(bytes.Buffer), new(bytes.Buffer)), "already exists")
		require.Equal(t, before, ownState())
	})
}

// TestOwnAPIServer measures an API server that the run starts. Nodes lose their connections, and
// some are slow.
func TestOwnAPIServer(t *testing.T) {
	r := run(t, report.KubeAPIServer, slices.Concat(small, []string{"--scenario=reconnect-storm", "--slow-percent=40", "--slow-delay=200ms"})...)
	require.NotEmpty(t, r.Versions.KubeAPIServer)
	require.NotEmpty(t, r.Versions.Etcd)
	first := r.Repeats[0]
	require.NotContains(t, strings.Join(first.Notes, "\n"), "refused to stream")
	require.Len(t, first.Phases, 4)
	require.EqualValues(t, 6, first.Phases[2].Updates)
	require.EqualValues(t, 2*first.Phases[3].Changes, first.Phases[3].SlowLatency.Count, "two of six nodes are slow")
	require.Greater(t, first.Phases[0].ServerCPU.Total(), 0.)
	require.Contains(t, strings.Join(first.Notes, "\n"), "the API server compressed 18 lists")
	require.Greater(t, r.Summary["bytes-per-update"].Median, 10_000., "changes are sent as whole slices, not compressed")
	require.InEpsilon(t, 1e6*first.Phases[3].ServerCPU.Total()/float64(first.Phases[3].Changes), r.Summary["api-server-cpu-per-change"].Median, 1e-9)
}

// TestServersWatchOwnAPIServer starts an API server and a Slicecast server that watches it. The
// report has the CPU time of each.
func TestServersWatchOwnAPIServer(t *testing.T) {
	r := run(t, report.Slicecast, slices.Concat(small, []string{"--scenario=steady", "--rate=20", "--kube-apiserver=own"})...)
	require.Equal(t, report.OwnAPIServer, r.Source)
	require.NotEmpty(t, r.Versions.KubeAPIServer)
	for _, p := range r.Repeats[0].Phases {
		require.Positive(t, p.ServerCPU.Total(), p.Name)
		require.NotNil(t, p.APIServerCPU, p.Name)
	}
	require.Greater(t, r.Summary["api-server-cpu-per-change"].Median, 100., "a write should cost more than 100 µs")
	require.Greater(t, r.Summary["api-server-cpu-per-change"].Median, r.Summary["cpu-per-update"].Median)
	require.Contains(t, strings.Join(r.Notes, "\n"), "is a metric of its own")
}

// TestStreamedLists counts the lists that an API server streams. The cluster has no controllers,
// which would stream lists, too.
func TestStreamedLists(t *testing.T) {
	cp := controlplane.Start(t, controlplane.Options{})
	for peer, want := range map[report.Peer]int{
		report.KubeAPIServer: 4, // one for each node, and one for the final check
		report.Slicecast:     2, // one for the server, and one for the final check
	} {
		before := streamedLists(t, cp)
		r := run(t, peer, "--nodes=3", "--duration=100ms", "--kube-apiserver="+cp.Kubeconfig(t, cp.AdminConfig()))
		require.Equal(t, want, streamedLists(t, cp)-before, peer)
		require.NotContains(t, strings.Join(r.Repeats[0].Notes, "\n"), "refused to stream")
	}
}

// TestFetchedLists uses an API server that does not stream lists, and checks that the report says
// so.
func TestFetchedLists(t *testing.T) {
	cp := controlplane.Start(t, controlplane.Options{APIServerFlags: []string{"--feature-gates=WatchList=false"}})
	r := run(t, report.KubeAPIServer, "--nodes=2", "--duration=100ms", "--kube-apiserver="+cp.Kubeconfig(t, cp.AdminConfig()))
	require.Contains(t, r.Repeats[0].Notes, "nodes fetched 6 lists, because the API server refused to stream them")
	require.Empty(t, r.Versions.Etcd, "the run did not start etcd")
	require.Zero(t, streamedLists(t, cp))
}

// streamedLists returns the number of lists of EndpointSlices that the API server has streamed,
// according to its metrics.
func streamedLists(t *testing.T, cp *controlplane.ControlPlane) (n int) {
	t.Helper()
	metrics, err := cp.Client().CoreV1().RESTClient().Get().AbsPath("/metrics").DoRaw(t.Context())
	require.NoError(t, err)
	for line := range strings.Lines(string(metrics)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if strings.HasPrefix(name, "apiserver_watch_list_duration_seconds_count{") && strings.Contains(name, `resource="endpointslices"`) {
			count, err := strconv.Atoi(value)
			require.NoError(t, err)
			n += count
		}
	}
	return n
}

// reader returns the configuration of a user who may read only what kube-proxies read.
func reader(t *testing.T, cp *controlplane.ControlPlane) *rest.Config {
	t.Helper()
	const name = "loadtest-reader"
	rbac := cp.Client().RbacV1()
	verbs := []string{"list", "watch"}
	_, err := rbac.ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"services", "nodes"}, Verbs: verbs},
			{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}, Verbs: verbs},
		},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	_, err = rbac.ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name}, RoleRef: rbacv1.RoleRef{Kind: "ClusterRole", Name: name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.UserKind, Name: name}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	return cp.ConfigFor(name)
}

// awaited collects output, and closes seen once the output contains want.
type awaited struct {
	all  bytes.Buffer
	want string
	once sync.Once
	seen chan struct{}
}

// Write implements io.Writer.
func (a *awaited) Write(b []byte) (int, error) {
	n, err := a.all.Write(b)
	if strings.Contains(a.all.String(), a.want) {
		a.once.Do(func() { close(a.seen) })
	}
	return n, err
}

func awaitGone(t *testing.T, cp *controlplane.ControlPlane, namespace string) {
	t.Helper()
	require.Eventually(t, func() bool {
		_, err := cp.Client().CoreV1().Namespaces().Get(t.Context(), namespace, metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	}, 2*time.Minute, 100*time.Millisecond)
}

// makeSlice creates a Service with a slice that no controller manages. It returns a function that
// changes the slice, with pauses, until its context ends.
func makeSlice(t *testing.T, cp *controlplane.ControlPlane, namespace string) (change func(context.Context, time.Duration) error) {
	t.Helper()
	_, err := cp.Client().CoreV1().Services(namespace).Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	all := cp.Client().DiscoveryV1().EndpointSlices(namespace)
	s, err := all.Create(t.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.1.2.3"}}},
		Ports: []discoveryv1.EndpointPort{{Port: new(int32(8080))}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	s.ResourceVersion = "" // update whatever version exists then
	ready := true
	return func(ctx context.Context, pause time.Duration) error {
		for ctx.Err() == nil {
			ready = !ready
			s.Endpoints[0].Conditions.Ready = new(ready)
			s.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: time.Now().UTC().Format(time.RFC3339Nano)}
			if _, err := all.Update(ctx, s, metav1.UpdateOptions{}); err != nil && ctx.Err() == nil {
				return err
			}
			select {
			case <-ctx.Done():
			case <-time.After(pause):
			}
		}
		return ctx.Err()
	}
}
