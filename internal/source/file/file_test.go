// These tests prove that the source follows a real directory: edits, renames, links, mounted
// ConfigMaps, and a directory that is deleted and made again. A bad manifest is reported, and the
// rest goes on.
package file

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/logtest"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source/sourcetest"
)

const deadline = 30 * time.Second

type running struct {
	*sourcetest.Recorder
	t      *testing.T
	dir    string
	log    *logtest.Buffer
	source *Source
}

// start runs a source on the directory until the test ends, and waits for its first sync.
func start(t *testing.T, dir string) *running {
	t.Helper()
	return startWith(t, dir, func(*Source) {})
}

func startWith(t *testing.T, dir string, prepare func(*Source)) *running {
	t.Helper()
	r := &running{Recorder: sourcetest.New(), t: t, dir: dir, log: &logtest.Buffer{}}
	var err error
	r.source, err = New(Options{Directory: dir, Log: slog.New(slog.NewTextHandler(r.log, nil)), Metrics: prometheus.NewRegistry()})
	require.NoError(t, err)
	prepare(r.source)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.source.Run(ctx, r.Recorder) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
		if t.Failed() {
			t.Log(r.log.String())
		}
	})
	r.eventually("the first sync", r.IsSynced)
	return r
}

func (r *running) eventually(what string, ok func() bool) {
	r.t.Helper()
	require.Eventually(r.t, ok, deadline, 2*time.Millisecond, what)
}

// holds waits until the sink has exactly these Services.
func (r *running) holds(names ...string) {
	r.t.Helper()
	r.eventually("Services "+strings.Join(names, " "), func() bool { return strings.Join(r.services(), " ") == strings.Join(names, " ") })
}

func (r *running) services() []string {
	var names []string
	for _, k := range r.Keys(model.KindService) {
		names = append(names, strings.TrimPrefix(k, "Service default/"))
	}
	return names
}

func (r *running) logged(what string) {
	r.t.Helper()
	r.eventually("in the log: "+what, func() bool { return strings.Contains(r.log.String(), what) })
}

func (r *running) problems() float64 { return testutil.ToFloat64(r.source.gauge) }

func write(t *testing.T, path, text string) {
	t.Helper()
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
}

func service(name string, extra ...string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata:\n  name: %s\nspec:\n  clusterIP: 10.96.0.1\n  ports:\n  - port: 80\n%s",
		name, strings.Join(extra, ""))
}

func TestFollowsEditsRenamesAndDeletes(t *testing.T) {
	dir := t.TempDir()
	web := filepath.Join(dir, "web.yaml")
	write(t, web, service("web"))
	write(t, filepath.Join(dir, "notes.txt"), service("text"))
	write(t, filepath.Join(dir, ".hidden.yaml"), service("hidden"))
	r := start(t, dir)
	require.Equal(t, []string{"web"}, r.services())

	write(t, web, service("web")+"---\n"+service("db"))
	r.holds("db", "web")

	write(t, web+".tmp", service("web")) // as some editors save
	require.NoError(t, os.Rename(web+".tmp", web))
	r.holds("web")

	r.Changes()
	require.NoError(t, os.Rename(web, web+"~")) // as other editors save
	write(t, web, service("web"))
	require.NoError(t, os.Remove(web+"~"))
	write(t, filepath.Join(dir, "z.json"), `{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "z"}, "spec": {"clusterIP": "10.96.0.3"}}`)
	r.holds("web", "z")
	require.Equal(t, []string{"add Service default/z"}, r.Changes())

	require.NoError(t, os.Rename(web, filepath.Join(dir, "renamed.yml")))
	require.NoError(t, os.Remove(filepath.Join(dir, "z.json")))
	r.holds("web")
	require.NoError(t, os.Remove(filepath.Join(dir, "renamed.yml")))
	r.holds()
	require.Zero(t, r.problems())
}

func TestFollowsAMountedConfigMap(t *testing.T) {
	dir := t.TempDir()
	version := func(n, text string) {
		require.NoError(t, os.Mkdir(filepath.Join(dir, "..v"+n), 0o700))
		write(t, filepath.Join(dir, "..v"+n, "web.yaml"), text)
		require.NoError(t, os.Symlink("..v"+n, filepath.Join(dir, "..data_tmp")))
		require.NoError(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
	}
	version("1", service("one"))
	require.NoError(t, os.Symlink("..data/web.yaml", filepath.Join(dir, "web.yaml")))
	r := start(t, dir)
	require.Equal(t, []string{"one"}, r.services())
	version("2", service("two"))
	r.holds("two")
	require.NoError(t, os.RemoveAll(filepath.Join(dir, "..v1")))
	version("3", service("three"))
	r.holds("three")
}

func TestBadManifestsAreReportedAndTheRestGoesOn(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a.yaml"), filepath.Join(dir, "b.yaml")
	write(t, a, service("bad")+"---\nkind: [\n---\n"+service("first"))
	r := start(t, dir)
	require.Equal(t, []string{"bad", "first"}, r.services(), "synced in spite of a bad document")
	r.logged("a.yaml:1") // the parser reports the line; its own tests cover that
	require.Equal(t, 1.0, r.problems())

	write(t, b, service("web"))
	r.holds("bad", "first", "web")
	write(t, b, strings.Replace(service("web"), "10.96.0.1", "10.96.0", 1))
	r.logged("b.yaml:6: Service default/web: spec.clusterIP: ")
	write(t, a, service("bad"))
	r.holds("bad", "web")
	require.Equal(t, 1.0, r.problems())

	write(t, b, service("good"))
	r.holds("bad", "good")
	r.eventually("no problems", func() bool { return r.problems() == 0 })
	write(t, b, "kind: {")
	r.eventually("a problem", func() bool { return r.problems() == 1 })
	require.Equal(t, []string{"bad", "good"}, r.services())
	require.NoError(t, os.Remove(b))
	r.holds("bad")

	require.NoError(t, os.Symlink("loop.yaml", filepath.Join(dir, "loop.yaml")))
	r.logged("loop.yaml: cannot be read: ")
	require.NoError(t, os.Mkdir(filepath.Join(dir, "sub.yaml"), 0o700))
	r.logged("sub.yaml: is not a regular file: ")
	require.NoError(t, os.Symlink("nowhere.yaml", filepath.Join(dir, "link.yaml")))
	r.logged("link.yaml: is a broken link: ")
	require.Equal(t, 3.0, r.problems())
	require.NoError(t, os.Remove(filepath.Join(dir, "sub.yaml")))
	write(t, filepath.Join(dir, "nowhere.yaml"), service("somewhere"))
	r.eventually("one problem less, and the other another", func() bool { return r.problems() == 2 })
	r.logged("nowhere.yaml:1: Service default/somewhere is already in link.yaml:1")
}

// TestWhatALinkLedTo checks that objects are removed when the link to their file leads nowhere any
// more.
func TestWhatALinkLedTo(t *testing.T) {
	dir, target := t.TempDir(), filepath.Join(t.TempDir(), "web.yaml")
	write(t, target, service("web"))
	require.NoError(t, os.Symlink(target, filepath.Join(dir, "web.yaml")))
	r := start(t, dir)
	require.Equal(t, []string{"web"}, r.services())
	require.NoError(t, os.Remove(target))
	write(t, filepath.Join(dir, "notes.txt"), "") // otherwise only the next rescan would notice
	r.holds()
	r.logged("web.yaml: is a broken link: ")
}

// TestKindsOfANewerKubernetes checks that unknown kinds do not affect other objects of the file.
func TestKindsOfANewerKubernetes(t *testing.T) {
	file := filepath.Join(t.TempDir(), "all.yaml")
	const other = "\n---\napiVersion: v1\nkind: BrandNew\nmetadata: {name: x}\n"
	write(t, file, service("web")+other)
	r := start(t, filepath.Dir(file))
	require.Equal(t, []string{"web"}, r.services())
	write(t, file, other)
	r.holds()
	require.Equal(t, 1.0, r.problems())
}

func TestTheFirstFileWithAnObjectHasIt(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a.yaml"), filepath.Join(dir, "b.yaml")
	withIP := func(ip string) string { return strings.Replace(service("web"), "10.96.0.1", ip, 1) }
	write(t, b, "---\n"+withIP("10.96.0.2"))
	r := start(t, dir)
	holdsIP := func(ip string) {
		t.Helper()
		r.eventually(ip, func() bool {
			s, ok := r.Get(model.Key{Kind: model.KindService, Namespace: "default", Name: "web"}).(*model.Service)
			return ok && s.ClusterIPs[0].String() == ip
		})
	}
	holdsIP("10.96.0.2")
	write(t, a, withIP("10.96.0.1"))
	holdsIP("10.96.0.1")
	r.logged("b.yaml:2: Service default/web is already in a.yaml:1, and that one is used: remove one of them")
	require.Equal(t, 1.0, r.problems())
	require.NoError(t, os.Remove(a))
	holdsIP("10.96.0.2")
	require.Zero(t, r.problems())
	require.NotContains(t, r.Changes(), "remove Service default/web")
}

func TestDirectoryDeletedAndMadeAgain(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "manifests")
	require.NoError(t, os.Mkdir(dir, 0o700))
	write(t, filepath.Join(dir, "web.yaml"), service("web"))
	r := start(t, dir)
	r.Changes()
	for n := range 3 {
		// Atomically; RemoveAll would first empty it.
		require.NoError(t, os.Rename(dir, fmt.Sprintf("%s-old-%d", dir, n)))
		r.eventually("a report", func() bool { return r.problems() == 1 })
		require.Contains(t, r.services(), "web", "what it held stays")
		require.NoError(t, os.Mkdir(dir, 0o700))
		write(t, filepath.Join(dir, "web.yaml"), service("web"))
		write(t, filepath.Join(dir, "new.yaml"), service(fmt.Sprintf("new-%d", n)))
		r.holds(fmt.Sprintf("new-%d", n), "web")
		require.Zero(t, r.problems())
	}
	require.NoError(t, os.RemoveAll(dir))
	require.NoError(t, os.Mkdir(dir, 0o700))
	write(t, filepath.Join(dir, "last.yaml"), service("last"))
	r.holds("last")
	write(t, filepath.Join(dir, "last.yaml"), service("more"))
	r.holds("more")
}

// TestWithoutNotifications proves that a source reads its directory although the kernel has no
// notifications left, and follows it as usual once there are some.
func TestWithoutNotifications(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "web.yaml"), service("web"))
	var left atomic.Bool
	r := startWith(t, dir, func(s *Source) {
		s.newWatcher = func() (*fsnotify.Watcher, error) {
			if !left.Load() {
				return nil, errors.New("too many open files")
			}
			return fsnotify.NewWatcher()
		}
	})
	r.holds("web")
	require.Equal(t, 1.0, r.problems())
	r.logged("fs.inotify.max_user_instances")
	left.Store(true)
	write(t, filepath.Join(dir, "more.yaml"), service("more"))
	r.holds("more", "web")
	r.eventually("no problem", func() bool { return r.problems() == 0 })
}

func TestNodesHaveTheServiceCIDRs(t *testing.T) {
	dir := t.TempDir()
	nodes, ranges := filepath.Join(dir, "nodes.yaml"), filepath.Join(dir, "ranges.yaml")
	node := func(name string) string { return "apiVersion: v1\nkind: Node\nmetadata: {name: " + name + "}\n---\n" }
	cidr := func(name, list string) string {
		return "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: " + name + "}\nspec: {cidrs: [" + list + "]}\n---\n"
	}
	write(t, nodes, node("n1"))
	write(t, ranges, cidr("kubernetes", "10.96.0.0/16"))
	r := start(t, dir)
	is := func(want string, names ...string) {
		t.Helper()
		r.eventually(want, func() bool {
			for _, name := range names {
				n, ok := r.Get(model.Key{Kind: model.KindNode, Name: name}).(*model.Node)
				if !ok || fmt.Sprint(n.ServiceCIDRs) != want {
					return false
				}
			}
			return true
		})
	}
	is("[10.96.0.0/16]", "n1")
	write(t, nodes, node("n1")+node("n2"))
	is("[10.96.0.0/16]", "n1", "n2")
	write(t, ranges, cidr("kubernetes", "10.96.0.0/16")+cidr("more", "10.64.0.0/16"))
	is("[10.64.0.0/16 10.96.0.0/16]", "n1", "n2")
	r.Changes()
	write(t, ranges, cidr("renamed", "10.96.0.0/16")+cidr("more", "10.64.0.0/16")+"---\n"+service("web"))
	r.holds("web")
	require.Equal(t, []string{"add Service default/web"}, r.Changes(), "the same ranges")
	require.NoError(t, os.Remove(ranges))
	is("[]", "n1", "n2")
	require.Zero(t, r.problems())
}

func TestMissingDirectoryIsAnError(t *testing.T) {
	_, err := New(Options{Directory: filepath.Join(t.TempDir(), "none"), Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry()})
	require.ErrorIs(t, err, os.ErrNotExist)
	require.ErrorContains(t, err, "create it")
}

func TestEndpointsAreMirroredForServicesWithoutASelector(t *testing.T) {
	dir := t.TempDir()
	var list strings.Builder
	for i := range 250 {
		fmt.Fprintf(&list, "  - ip: 10.0.0.%d\n", i+1)
	}
	endpoints := func(meta, addresses string) string {
		return "apiVersion: v1\nkind: Endpoints\nmetadata:\n  name: web\n" + meta + "subsets:\n- addresses:\n" + addresses + "  ports: [{port: 8080}]\n"
	}
	write(t, filepath.Join(dir, "endpoints.yaml"), endpoints("", list.String()))
	r := start(t, dir)
	require.Empty(t, r.Keys(model.KindSlice), "there is no Service")

	service1 := filepath.Join(dir, "service.yaml")
	write(t, service1, service("web"))
	three := []string{"EndpointSlice default/web-mirrored-1", "EndpointSlice default/web-mirrored-2", "EndpointSlice default/web-mirrored-3"}
	slices := func(want ...string) {
		t.Helper()
		r.eventually(fmt.Sprint("slices ", want), func() bool { return fmt.Sprint(r.Keys(model.KindSlice)) == fmt.Sprint(want) })
	}
	slices(three...)

	r.Changes()
	write(t, filepath.Join(dir, "endpoints.yaml"), endpoints("", strings.Replace(list.String(), "10.0.0.42\n", "10.0.9.42\n", 1)))
	r.eventually("a change", func() bool { return len(r.Changes()) > 0 })
	slices(three...)

	write(t, service1, service("web", "  selector: {app: web}\n"))
	slices()
	write(t, service1, service("web"))
	slices(three...)
	write(t, filepath.Join(dir, "endpoints.yaml"), endpoints("  labels: {endpointslice.kubernetes.io/skip-mirror: \"true\"}\n", list.String()))
	slices()
	write(t, filepath.Join(dir, "endpoints.yaml"), endpoints("", "  - ip: 10.0.0.1\n"))
	slices(three[0])
	write(t, filepath.Join(dir, "endpoints.yaml"), endpoints("  annotations: {control-plane.alpha.kubernetes.io/leader: x}\n", "  - ip: 10.0.0.1\n"))
	slices()
	write(t, filepath.Join(dir, "endpoints.yaml"), endpoints("", "  - ip: 10.0.0.1\n"))
	slices(three[0])
	require.NoError(t, os.Remove(service1))
	slices()
}

func TestHeadlessServicesAreCountedNotHeld(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "web.yaml")
	write(t, path, service("web"))
	r := start(t, dir)
	write(t, path, strings.Replace(service("web"), "10.96.0.1", "None", 1))
	r.holds()
	require.Zero(t, r.problems())
}
