// This test proves that nothing but programming keeps a node from being programmed. Ports are
// taken, files are torn or missing, and the agent programs what it knows, says what is wrong, and
// goes on by itself once that is mended. Everything is real except for the kernel.
package app

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/agent/programmer/printer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/logtest"
	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/tlsfiles"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// trouble is something that does not work while an agent starts.
type trouble struct {
	args  []string
	says  []string    // all in one line of the log
	mend  func()      // makes it work
	works func() bool // reports whether it does
	log   *logtest.Buffer
}

func replace(t *testing.T, path string, content []byte) {
	t.Helper()
	require.NoError(t, os.WriteFile(path+".new", content, 0o600))
	require.NoError(t, os.Rename(path+".new", path))
}

// write writes a certificate and its key to a directory, and returns their paths.
func write(t *testing.T, dir, name string, certificate func() (tls.Certificate, error)) (cert, key string) {
	t.Helper()
	c, err := certificate()
	require.NoError(t, err)
	cert, key, err = testca.Write(dir, name, c)
	require.NoError(t, err)
	return cert, key
}

// tear leaves only half of a file, and returns a function that restores it.
func tear(t *testing.T, path string) (restore func()) {
	t.Helper()
	whole, err := os.ReadFile(path)
	require.NoError(t, err)
	replace(t, path, whole[:len(whole)/2])
	return func() { replace(t, path, whole) }
}

// servingTroubles are troubles of what an agent serves.
func servingTroubles(t *testing.T, ca *testca.CA) map[string]*trouble {
	dir := t.TempDir()
	caFile, err := ca.WriteCA(dir)
	require.NoError(t, err)
	cert, key := write(t, dir, "metrics", func() (tls.Certificate, error) { return ca.Server("127.0.0.1") })
	_, otherKey := write(t, dir, "other", func() (tls.Certificate, error) { return ca.Server("127.0.0.1") })
	scraper, err := ca.Client("prometheus", "slicecast:observers")
	require.NoError(t, err)
	scraped := func(address string) func() bool {
		return func() bool {
			_, err := scrape(t, address, "", &tls.Config{RootCAs: ca.Pool(), Certificates: []tls.Certificate{scraper}})
			return err == nil
		}
	}
	listen := func(network, address string) net.Listener {
		l, err := net.Listen(network, address)
		require.NoError(t, err)
		return l
	}
	closed := func(l net.Listener) func() { return func() { require.NoError(t, l.Close()) } }
	answers := func(socket string) func() bool {
		return func() bool {
			_, err := runStatus(t, "--status-socket="+socket)
			return err == nil
		}
	}

	taken := listen("tcp", "127.0.0.1:0")
	port, torn, tokens := taken.Addr().String(), freeAddress(t), freeAddress(t)
	tornKey := filepath.Join(dir, "torn.key")
	good, err := os.ReadFile(key)
	require.NoError(t, err)
	foreign, err := os.ReadFile(otherKey)
	require.NoError(t, err)
	replace(t, tornKey, foreign)
	kubeconfig := filepath.Join(dir, "kubeconfig")
	socket, lateSocket := filepath.Join(dir, "taken.sock"), filepath.Join(dir, "late", "agent.sock")
	takenSocket := listen("unix", socket)
	certificates := func(address, key string) []string {
		return []string{"--secure-metrics-bind-address=" + address, "--metrics-cert-file=" + cert, "--metrics-key-file=" + key,
			"--metrics-client-ca-file=" + caFile}
	}
	return map[string]*trouble{
		"port of metrics taken": {
			args: certificates(port, key), says: []string{"--secure-metrics-bind-address", "another process listens on " + port},
			mend: closed(taken), works: scraped(port),
		},
		"certificate of metrics does not match": {
			args: certificates(torn, tornKey), says: []string{"--metrics-cert-file", "private key does not match"},
			mend: func() { replace(t, tornKey, good) }, works: scraped(torn),
		},
		"no kubeconfig for tokens of metrics": {
			args: append(certificates(tokens, key), "--metrics-token-audience=a", "--metrics-service-accounts=a/b", "--kubeconfig="+kubeconfig),
			says: []string{"--metrics-token-audience", kubeconfig},
			mend: func() { replace(t, kubeconfig, kubeconfigOf("https://127.0.0.1:1")) }, works: scraped(tokens),
		},
		"status socket taken": {
			args: []string{"--status-socket=" + socket}, says: []string{"--status-socket", "another process serves"},
			mend: closed(takenSocket), works: answers(socket),
		},
		"no directory for the status socket": {
			args: []string{"--status-socket=" + lateSocket}, says: []string{"--status-socket", filepath.Dir(lateSocket)},
			mend: func() { require.NoError(t, os.Mkdir(filepath.Dir(lateSocket), 0o700)) }, works: answers(lateSocket),
		},
	}
}

func kubeconfigOf(server string) []byte {
	return fmt.Appendf(nil, `{"apiVersion": "v1", "kind": "Config", "current-context": "c",
"clusters": [{"name": "c", "cluster": {"server": %q}}], "users": [{"name": "u"}],
"contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]}`, server)
}

// apiServer answers each list with EndpointSlices that name one server of agents. Once there are
// CAs, it also has a ConfigMap with them.
func apiServer(t *testing.T, server string, cas *atomic.Pointer[[]byte]) *httptest.Server {
	host, port, err := net.SplitHostPort(server)
	require.NoError(t, err)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if published := cas.Load(); strings.HasPrefix(r.URL.Path, "/api/v1/") && published == nil {
			http.NotFound(w, r)
			return
		} else if r.URL.Path == "/api/v1/namespaces/agents/configmaps/cas" {
			_, _ = fmt.Fprintf(w, `{"kind": "ConfigMap", "apiVersion": "v1", "data": {"ca.crt": %q}}`, *published)
			return
		}
		_, _ = fmt.Fprintf(w, `{"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1", "items": [{
			"addressType": "IPv4", "endpoints": [{"addresses": [%q]}], "ports": [{"name": "grpc", "port": %s}]}]}`, host, port)
	}))
	t.Cleanup(s.Close)
	return s
}

// connectionTroubles are troubles of an agent's way to the servers, or with its checkpoint. The
// servers have another endpoint than the checkpoint.
func connectionTroubles(t *testing.T, ca *testca.CA, checkpoint string) map[string]*trouble {
	dir, manifests := t.TempDir(), t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(manifests, "web.yaml"), fmt.Appendf(nil, manifest, 9090), 0o600))
	caFile, err := ca.WriteCA(dir)
	require.NoError(t, err)
	cert, key := write(t, dir, "server", func() (tls.Certificate, error) { return ca.Server("127.0.0.1") })
	secure, stop := serveManifests(t, manifests, &tlsfiles.Files{Certificate: cert, PrivateKey: key, CA: caFile})
	t.Cleanup(stop)
	plain, stop := serveManifests(t, manifests, nil)
	t.Cleanup(stop)
	// Each agent has files of its own.
	credentials := func(name string) (caFile, key string, args []string) {
		own := filepath.Join(dir, "of-"+name)
		require.NoError(t, os.Mkdir(own, 0o700))
		caFile, err := ca.WriteCA(own)
		require.NoError(t, err)
		cert, key := write(t, own, "client", func() (tls.Certificate, error) { return ca.Node("node-1") })
		return caFile, key, []string{"--ca-file=" + caFile, "--client-cert-file=" + cert, "--client-key-file=" + key}
	}
	kept := func(name string) string {
		content, err := os.ReadFile(checkpoint)
		require.NoError(t, err)
		own := filepath.Join(dir, name+".checkpoint")
		replace(t, own, content)
		return "--checkpoint=" + own
	}

	tornCA, _, ofTornCA := credentials("ca")
	_, tornKey, ofTornKey := credentials("key")
	missingCA, _, ofMissingCA := credentials("missing")
	whole, err := os.ReadFile(missingCA)
	require.NoError(t, err)
	require.NoError(t, os.Remove(missingCA))
	kubeconfig := filepath.Join(dir, "kubeconfig")
	var published atomic.Pointer[[]byte]
	require.NoError(t, os.WriteFile(kubeconfig, kubeconfigOf(apiServer(t, secure, &published).URL), 0o600))
	_, _, ofKubeconfig := credentials("kubeconfig")
	otherKubeconfig := filepath.Join(dir, "other-kubeconfig") // which stays whole
	require.NoError(t, os.WriteFile(otherKubeconfig, kubeconfigOf(apiServer(t, secure, &published).URL), 0o600))
	unmountedCA, _, ofUnmountedCA := credentials("unmounted")
	require.NoError(t, os.Remove(unmountedCA))
	directory := filepath.Join(dir, "directory")
	require.NoError(t, os.Mkdir(directory, 0o700))
	return map[string]*trouble{
		"CA torn": {
			args: append(ofTornCA, "--servers="+secure, kept("ca")),
			says: []string{"Cannot use the TLS files", tornCA}, mend: tear(t, tornCA),
		},
		"key torn": {
			args: append(ofTornKey, "--servers="+secure, kept("key")),
			says: []string{"Cannot use the TLS files", tornKey}, mend: tear(t, tornKey),
		},
		"CA missing": {
			args: append(ofMissingCA, "--servers="+secure, kept("missing")),
			says: []string{"Cannot use the TLS files", missingCA}, mend: func() { replace(t, missingCA, whole) },
		},
		"CA published, and not mounted yet": {
			args: append(ofUnmountedCA, "--ca-config-map=agents/cas", "--server-service=ns/servers", "--kubeconfig="+otherKubeconfig, kept("unmounted")),
			says: []string{"Cannot use the TLS files", unmountedCA}, mend: func() { published.Store(&whole) },
		},
		"kubeconfig torn": {
			args: append(ofKubeconfig, "--server-service=ns/servers", "--kubeconfig="+kubeconfig, kept("kubeconfig")),
			says: []string{"list the EndpointSlices of Service ns/servers", kubeconfig}, mend: tear(t, kubeconfig),
		},
		"directory in place of the checkpoint": {
			args: []string{"--servers=" + plain, "--insecure-plaintext", "--checkpoint=" + directory},
			says: []string{"Cannot use the checkpoint", directory, "not a regular file"}, mend: func() {},
		},
	}
}

// TestNothingButProgrammingKeepsANodeFromBeingProgrammed runs an agent in each trouble.
func TestNothingButProgrammingKeepsANodeFromBeingProgrammed(t *testing.T) {
	manifests := t.TempDir()
	checkpoint, _ := keptByAnAgent(t, manifests)
	ca := newCA(t)
	outs := make(map[string]*logtest.Buffer)
	all := connectionTroubles(t, ca, checkpoint)
	for name, c := range all {
		outs[name], c.log = startLogged(t, append(c.args, "--programmer=printer")...)
		c.works = func() bool { return strings.Contains(outs[name].String(), "10.180.0.1:9090") }
	}
	for name, c := range servingTroubles(t, ca) {
		all[name] = c
		outs[name], c.log = startLogged(t, append(c.args, "--programmer=printer", "--source=file", "--manifests="+manifests)...)
	}
	for name, c := range all {
		require.Eventually(t, func() bool {
			return strings.Contains(outs[name].String(), "10.180.0.1:") && c.log.Count(c.says...) > 0
		}, time.Minute, 10*time.Millisecond, "%s: %v in %s", name, c.says, c.log)
	}
	for _, c := range all {
		c.mend()
	}
	for name, c := range all {
		require.Eventually(t, c.works, time.Minute, 10*time.Millisecond, "%s: %s", name, c.log)
		require.LessOrEqual(t, c.log.Count(append(c.says, `level=WARN msg="Cannot`)...), 1, "%s: %s", name, c.log)
	}
}

// TestWhatIsNotServedIsAWarning proves that the node's warnings name what the agent cannot serve,
// and that the metric counts each attempt.
func TestWhatIsNotServedIsAWarning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := &logtest.Buffer{}
		registry := daemon.NewRegistry()
		a := &agent{
			options: &Options{Programmer: programmerPrinter}, programmer: &chosen{Programmer: printer.New(log)},
			cache: client.NewCache(), services: newServices(slog.New(slog.NewTextHandler(log, nil)), registry),
		}
		check := a.check(view.Options{})
		const kind = pb.NodeWarning_NODE_WARNING_NOT_SERVED
		require.Empty(t, check(t.Context()))
		ctx, cancel := context.WithCancel(t.Context())
		taken, broken := errors.New("--status-socket: it is taken"), errors.New("--status-socket: it broke")
		var why atomic.Pointer[error] // why the socket cannot be opened
		why.Store(&taken)
		open := make(chan error, 1)
		go a.services.Serve(ctx, "status-socket", func() (net.Listener, error) { return nil, *why.Load() }, func(ctx context.Context, _ net.Listener) error {
			select {
			case <-ctx.Done():
				return nil
			case err := <-open:
				return err
			}
		})
		<-time.After(time.Minute)
		require.Equal(t, map[pb.NodeWarning]string{kind: taken.Error()}, check(t.Context()))
		families, err := registry.Gather()
		require.NoError(t, err)
		at := slices.IndexFunc(families, func(f *dto.MetricFamily) bool { return f.GetName() == "slicecast_agent_serve_errors_total" })
		require.InDelta(t, 9, families[at].GetMetric()[0].GetCounter().GetValue(), 1, "after 1, 3, 7, 15, 25 ... 55 s")
		require.Equal(t, 1, log.Count("level=WARN", "it is taken"))
		why.Store(new(error))
		<-time.After(time.Minute)
		require.Empty(t, check(t.Context()))
		require.Equal(t, 1, log.Count("level=INFO", "Serving again"))
		why.Store(&broken)
		open <- broken // what serves may fail later, too
		<-time.After(time.Second / 2)
		require.Equal(t, map[pb.NodeWarning]string{kind: broken.Error()}, check(t.Context()))
		cancel()
	})
}
