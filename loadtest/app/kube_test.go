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
	"github.com/slicecast/slicecast/loadtest/engine"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/scenario"
	"github.com/slicecast/slicecast/loadtest/worker"
)

// TestSomebodysCluster has a real API server with Services of its own, in which nothing is written but where it is allowed.
func TestSomebodysCluster(t *testing.T) {
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
			require.Zero(t, changes.Changes, "nobody knows")
			require.Equal(t, before, ownState(), "nothing was written")
			require.Contains(t, r.Notes[0], "last-change-trigger-time")
			require.Equal(t, 3, r.Repeats[0].Check.Nodes)
			require.Equal(t, "observed", r.Scenario.Name)
			require.Contains(t, r.Scenario.Parameters, "duration")
			require.NotContains(t, r.Scenario.Parameters, "rate", "it is the cluster's")
			if peer == report.KubeAPIServer {
				require.Positive(t, changes.ServerCPU.Total(), "as it tells itself")
				require.Contains(t, r.Summary, "cpu-per-update")
				require.NotContains(t, r.Summary, "cpu-user-per-update", "nobody knows")
				require.Contains(t, strings.Join(r.Repeats[0].Notes, "\n"), "what it says in its metrics")
			}
		})
	}
	t.Run("observed by who may not see what the API server uses", func(t *testing.T) {
		user := "--kube-apiserver=" + cp.Kubeconfig(t, reader(t, cp))
		r := run(t, report.KubeAPIServer, "--nodes=1", "--duration=100ms", user)
		require.Nil(t, r.Repeats[0].Phases[1].ServerCPU)
		require.Contains(t, strings.Join(r.Repeats[0].Notes, "\n"), "needs to get the non-resource URL /metrics")
	})
	// Both in the same one: what comes second waits until the cluster has removed what was first. Others change theirs meanwhile.
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
			require.Equal(t, 11, r.Repeats[0].State.Services, "the cluster's own ones are another proxy's")
		})
	}
	awaitGone(t, cp, namespace)
	require.Equal(t, before, ownState())

	t.Run("the API server has the truth", func(t *testing.T) {
		setup := worker.Setup{
			Scenario: scenario.Scenario{Nodes: 2}, Count: 2, Kubeconfig: cp.Kubeconfig(t, cp.AdminConfig()),
			Servers: []string{(&oneShard{service: func(string) *model.Service { return webService(80) }}).serve(t)},
		}
		w, err := worker.Start(t.Context(), os.Stderr, []string{engine.WorkCommand}, setup)
		require.NoError(t, err)
		defer func() { require.NoError(t, w.Close()) }()
		require.NoError(t, w.Run(t.Context()))
		_, err = w.Synced(t.Context())
		require.NoError(t, err)
		checked, err := w.Check(t.Context(), 5*time.Second)
		require.NoError(t, err)
		require.Contains(t, checked.Wrong, "Service default/web should not be there", "a server that is wrong tells every node the same")
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
		require.Contains(t, progress.all.String(), "get all EndpointSlices", "who reads that can still stop it")
		awaitGone(t, cp, "loadtest-interrupted")
	})

	// A terminal's ^C reaches the comparison and all that it started at once; a comparison that is killed tells nobody.
	t.Run("comparisons", func(t *testing.T) {
		for name, end := range map[string]func(pid int) error{
			"interrupted": func(pid int) error { return syscall.Kill(-pid, syscall.SIGINT) },
			"killed":      func(pid int) error { return syscall.Kill(pid, syscall.SIGKILL) },
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel() // the end of a namespace takes the cluster long
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

	t.Run("a namespace that is there", func(t *testing.T) {
		o := options(t, report.KubeAPIServer, append(small, kubeconfig, "--write-namespace="+theirs)...)
		require.ErrorContains(t, Run(t.Context(), o, new(bytes.Buffer), new(bytes.Buffer)), "is there already")
		require.Equal(t, before, ownState())
	})
}

// TestOwnAPIServer measures one that the run starts, with nodes that lose their connections, and of which some are slow.
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
	require.Contains(t, strings.Join(first.Notes, "\n"), "the API server compressed 18 watches")
	require.Greater(t, r.Summary["bytes-per-update"].Median, 2000., "whole slices, compressed")
	require.InEpsilon(t, 1e6*first.Phases[3].ServerCPU.Total()/float64(first.Phases[3].Changes), r.Summary["api-server-cpu-per-change"].Median, 1e-9)
}

// TestServersWatchOwnAPIServer has the run's API server behind a server that the run starts, too: each has its CPU time told.
func TestServersWatchOwnAPIServer(t *testing.T) {
	r := run(t, report.Slicecast, slices.Concat(small, []string{"--scenario=steady", "--rate=20", "--kube-apiserver=own"})...)
	require.Equal(t, report.OwnAPIServer, r.Source)
	require.NotEmpty(t, r.Versions.KubeAPIServer)
	for _, p := range r.Repeats[0].Phases {
		require.Positive(t, p.ServerCPU.Total(), p.Name)
		require.NotNil(t, p.APIServerCPU, p.Name)
	}
	require.Greater(t, r.Summary["api-server-cpu-per-change"].Median, 100., "a write is more than a hundred microseconds")
	require.Greater(t, r.Summary["api-server-cpu-per-change"].Median, r.Summary["cpu-per-update"].Median)
	require.Contains(t, strings.Join(r.Notes, "\n"), "is a figure of its own")
}

// TestStreamedLists has an API server count what it streams. It is without controllers, as they are streamed lists, too.
func TestStreamedLists(t *testing.T) {
	cp := controlplane.Start(t, controlplane.Options{})
	for peer, want := range map[report.Peer]int{
		report.KubeAPIServer: 4, // each node's, and that of the truth at the end
		report.Slicecast:     2, // the server's, and that of the truth at the end
	} {
		before := streamedLists(t, cp)
		r := run(t, peer, "--nodes=3", "--duration=100ms", "--kube-apiserver="+cp.Kubeconfig(t, cp.AdminConfig()))
		require.Equal(t, want, streamedLists(t, cp)-before, peer)
		require.NotContains(t, strings.Join(r.Repeats[0].Notes, "\n"), "refused to stream")
	}
}

// TestListsThatAreNotStreamed has an API server that streams none, which the report says.
func TestListsThatAreNotStreamed(t *testing.T) {
	cp := controlplane.Start(t, controlplane.Options{APIServerFlags: []string{"--feature-gates=WatchList=false"}})
	r := run(t, report.KubeAPIServer, "--nodes=2", "--duration=100ms", "--kube-apiserver="+cp.Kubeconfig(t, cp.AdminConfig()))
	require.Contains(t, r.Repeats[0].Notes, "nodes fetched 6 lists, which the API server refused to stream")
	require.Empty(t, r.Versions.Etcd, "nobody knows")
	require.Zero(t, streamedLists(t, cp))
}

// streamedLists is how many lists of EndpointSlices the API server says that it has streamed.
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

// reader gives who may only see what kube-proxies see.
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

// awaited is output in which something is awaited.
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

// makeSlice makes a Service with a slice that nobody else cares for, and gives what changes it, with pauses, until its context ends.
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
	s.ResourceVersion = "" // whatever it is by then
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
