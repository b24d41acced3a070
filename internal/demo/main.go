// Command demo shows Slicecast's main function on one machine without a cluster: a server that
// reads manifests, an agent on a node, pods that come and go, and real traffic. Nodes and pods are
// network namespaces, which disappear when the demo ends for any reason.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/testenv"
)

// patience bounds the time of any one step on a slow machine.
const patience = 20 * time.Second

// Addresses in examples/.
var (
	web    = netip.MustParseAddrPort("10.96.0.80:80")
	web6   = netip.MustParseAddrPort("[fd00:10:96::80]:80")
	legacy = netip.MustParseAddrPort("10.96.0.81:53")
	empty  = netip.MustParseAddrPort("10.96.0.82:80")
)

const (
	webPort    = 8080
	legacyPort = 5353
	webNode    = 30080
	serverPort = "8472"
	healthz    = "127.0.0.1:8473"
)

func main() {
	bin := flag.String("bin", "bin", "directory of the built commands")
	examples := flag.String("examples", "examples", "directory of the manifests")
	var at sockets
	flag.StringVar(&at.server, "debug-socket", "/tmp/slicecast-demo.sock", "the server's debug socket, for grpcurl and slicecast-server status")
	flag.StringVar(&at.agent, "status-socket", "/tmp/slicecast-demo-agent.sock", "the agent's socket, for slicecast-agent status")
	hold := flag.Bool("hold", false, "run until interrupted, with an endpoint that turns ready and not ready every 2 s")
	flag.Parse()
	testenv.Isolate(func() error { return requirements(*bin, *examples) })

	ctx, stop := daemon.SignalContext(context.Background())
	err := run(ctx, *bin, *examples, at, *hold)
	interrupted := ctx.Err() != nil
	stop()
	if err != nil && !interrupted {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// requirements returns an error that names what is missing on this machine and how to get it.
func requirements(bin, examples string) error {
	var missing []string
	if _, err := exec.LookPath("iptables-restore"); err != nil {
		missing = append(missing, "iptables (Debian and Ubuntu: apt-get install iptables)")
	}
	for _, c := range []string{"slicecast-server", "slicecast-agent"} {
		if _, err := os.Stat(filepath.Join(bin, c)); err != nil {
			missing = append(missing, filepath.Join(bin, c)+" (make build)")
		}
	}
	if _, err := os.Stat(filepath.Join(examples, "web.yaml")); err != nil {
		missing = append(missing, examples+" (run from the top of the repository)")
	}
	if len(missing) > 0 {
		return errors.New("the demo needs " + strings.Join(missing, ", and "))
	}
	return nil
}

type sockets struct{ server, agent string }

// world holds everything that the demo runs. It implements testenv.TB.
type world struct {
	dir       string // the files of this run
	manifests string // the copy of examples/ that the server reads
	network   *testenv.Network
	node1     *testenv.Node
	node2     *testenv.Node
	client    *testenv.Client
	pods      map[string]*testenv.Pod
	cleanups  []func()
	failed    error // set by Fatalf
}

// Helper implements testenv.TB.
func (w *world) Helper() {}

// Fatalf implements testenv.TB. It ends the current step with a panic, from which run recovers.
func (w *world) Fatalf(format string, args ...any) {
	w.failed = fmt.Errorf(format, args...)
	panic(w)
}

// Cleanup implements testenv.TB.
func (w *world) Cleanup(f func()) { w.cleanups = append(w.cleanups, f) }

func run(ctx context.Context, bin, examples string, at sockets, hold bool) (err error) {
	w := &world{pods: make(map[string]*testenv.Pod)}
	defer func() {
		if r := recover(); r != nil && r != any(w) {
			panic(r)
		}
		err = errors.Join(err, w.failed)
		for i := len(w.cleanups) - 1; i >= 0; i-- {
			w.cleanups[i]()
		}
	}()
	// The isolated process has its own /run, which disappears with the process.
	if w.dir, err = os.MkdirTemp("/run", "slicecast-demo-"); err != nil {
		return err
	}
	w.manifests = filepath.Join(w.dir, "manifests")
	if err := os.CopyFS(w.manifests, os.DirFS(examples)); err != nil {
		return fmt.Errorf("copy the manifests: %w", err)
	}

	title("Two nodes, four pods and a client outside the cluster, as network namespaces")
	w.network = testenv.NewNetwork(w)
	w.node1, w.node2 = w.network.AddNode("node-1"), w.network.AddNode("node-2")
	for _, p := range []struct {
		name string
		node *testenv.Node
	}{{"pod-a", w.node1}, {"pod-b", w.node1}, {"pod-c", w.node2}, {"pod-d", w.node2}} {
		pod := p.node.AddPod(p.name)
		pod.Serve(testenv.TCP, webPort)
		pod.Serve(testenv.UDP, legacyPort)
		w.pods[p.name] = pod
		say("%s on %s: %s, %s", p.name, p.node.Name, pod.IPv4, pod.IPv6)
	}
	w.client = w.network.AddClient("client")

	title("slicecast-server on the manifests of %s/, slicecast-agent on node-1, with mutual TLS", examples)
	deltas, err := w.start(ctx, bin, at)
	if err != nil {
		return err
	}
	if err := w.traffic(ctx, deltas); err != nil {
		return err
	}
	if hold {
		return w.hold(ctx, at, deltas)
	}
	title("Done; \"make demo HOLD=1\" keeps it running, to explore with grpcurl")
	return nil
}

// start starts the server and the agent, and returns the agent's log.
func (w *world) start(ctx context.Context, bin string, at sockets) (*agentLog, error) {
	ca, err := testca.New()
	if err != nil {
		return nil, err
	}
	caFile, err := ca.WriteCA(w.dir)
	if err == nil {
		err = w.startServer(ctx, bin, at.server, ca, caFile)
	}
	if err != nil {
		return nil, err
	}
	return w.startAgent(ctx, bin, at.agent, ca, caFile)
}

// startServer starts the server and waits until it has read the manifests.
func (w *world) startServer(ctx context.Context, bin, socket string, ca *testca.CA, caFile string) error {
	serving, err := ca.Server("slicecast-server", w.network.World.IPv4.String())
	if err != nil {
		return err
	}
	cert, key, err := testca.Write(w.dir, "server", serving)
	if err != nil {
		return err
	}
	server := exec.CommandContext(ctx, filepath.Join(bin, "slicecast-server"),
		"--source=file", "--manifests="+w.manifests, "--bind-address=:"+serverPort,
		"--tls-cert-file="+cert, "--tls-private-key-file="+key, "--client-ca-file="+caFile,
		"--debug-socket="+socket, "--healthz-bind-address="+healthz, "--log-level=warn")
	if err := w.background(server, server.Start, "server"); err != nil {
		return err
	}
	if err := eventually(ctx, func() error { return ready(ctx) }); err != nil {
		return fmt.Errorf("the server did not become ready: %w", err)
	}
	return nil
}

// startAgent starts the agent, waits until it has programmed node-1, and returns its log.
func (w *world) startAgent(ctx context.Context, bin, socket string, ca *testca.CA, caFile string) (*agentLog, error) {
	identity, err := ca.Node("node-1")
	if err != nil {
		return nil, err
	}
	cert, key, err := testca.Write(w.dir, "node-1", identity)
	if err != nil {
		return nil, err
	}
	logReader, logWriter := io.Pipe()
	agent := w.node1.Command(ctx, filepath.Join(bin, "slicecast-agent"),
		"--node-name=node-1", "--servers="+net.JoinHostPort(w.network.World.IPv4.String(), serverPort),
		"--ca-file="+caFile, "--client-cert-file="+cert, "--client-key-file="+key,
		"--cluster-cidr=10.180.0.0/16,fd00:10:180::/48", "--status-socket="+socket, "--log-level=debug", "--log-format=json")
	agent.Stderr = logWriter
	log := followLog(logReader)
	w.Cleanup(func() { _ = logWriter.Close() })
	if err := w.background(agent.Cmd, agent.Start, "agent"); err != nil {
		return nil, err
	}
	if err := log.wait(ctx, "The node is programmed", ""); err != nil {
		return nil, fmt.Errorf("the agent did not program its node: %w", err)
	}
	say("node-1 is programmed")
	return log, nil
}

// ready returns nil if the server has read the manifests.
func ready(ctx context.Context) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+healthz+"/readyz", nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode != http.StatusOK {
		return errors.New(response.Status)
	}
	return nil
}

// background starts a command and interrupts it at the end.
func (w *world) background(c *exec.Cmd, start func() error, name string) error {
	output := &strings.Builder{}
	c.Stdout = output
	if c.Stderr == nil {
		c.Stderr = output
	}
	c.Cancel = func() error { return c.Process.Signal(os.Interrupt) }
	c.WaitDelay = patience
	if err := start(); err != nil {
		return fmt.Errorf("start the %s: %w", name, err)
	}
	w.Cleanup(func() {
		_ = c.Process.Signal(os.Interrupt)
		_ = c.Wait()
		if output.Len() > 0 {
			fmt.Fprintf(os.Stderr, "output of the %s:\n%s", name, output)
		}
	})
	return nil
}

// traffic shows what Services do to connections, and how connections follow changes of the
// manifests.
func (w *world) traffic(ctx context.Context, log *agentLog) error {
	if err := w.connections(ctx); err != nil {
		return err
	}
	log.printing.Store(true)
	defer log.printing.Store(false)
	last := readyLine("10.180.1.1", "node-2")
	for _, change := range []struct {
		title    string // none if it belongs to the change before
		old, now string // texts in web.yaml
		pods     []string
	}{
		{"web scales up: pod-d joins, by an edit of web.yaml", last, last + readyLine("10.180.1.2", "node-2"), []string{"pod-a", "pod-b", "pod-c", "pod-d"}},
		{"pod-b is not ready for a while", readiness("10.180.0.2", true), readiness("10.180.0.2", false), []string{"pod-a", "pod-c", "pod-d"}},
		{"", readiness("10.180.0.2", false), readiness("10.180.0.2", true), []string{"pod-a", "pod-b", "pod-c", "pod-d"}},
		{"web scales down to pod-c and pod-d", readyLine("10.180.0.1", "node-1") + readyLine("10.180.0.2", "node-1"), "", []string{"pod-c", "pod-d"}},
	} {
		if change.title != "" {
			title("%s", change.title)
		}
		if err := w.edit("web.yaml", change.old, change.now); err != nil {
			return err
		}
		// The delta is printed before the connections.
		if err := log.wait(ctx, "Received delta", "web"); err != nil {
			return err
		}
		if err := w.expect(ctx, w.pods["pod-a"].Host, testenv.TCP, web, "web, from pod-a", change.pods...); err != nil {
			return err
		}
	}
	title("One of fleet's 100 endpoints is replaced")
	if err := w.edit("fleet.yaml", "10.180.2.77]", "10.180.2.177]"); err != nil {
		return err
	}
	return log.wait(ctx, "Received delta", "fleet")
}

func (w *world) connections(ctx context.Context) error {
	title("100 connections to each Service")
	podA, nodePort := w.pods["pod-a"].Host, netip.AddrPortFrom(w.node1.IPv4, webNode)
	for _, c := range []struct {
		from  *testenv.Host
		proto testenv.Proto
		to    netip.AddrPort
		what  string
		pods  []string
	}{
		{podA, testenv.TCP, web, "web, from pod-a", []string{"pod-a", "pod-b", "pod-c"}},
		{podA, testenv.TCP, web6, "web over IPv6, from pod-a", []string{"pod-a", "pod-b", "pod-c"}},
		{w.client.Host, testenv.TCP, nodePort, "web's node port, from outside", []string{"pod-a", "pod-b", "pod-c"}},
		{podA, testenv.UDP, legacy, "legacy (an Endpoints object), UDP", []string{"pod-b", "pod-c"}},
	} {
		if err := w.expect(ctx, c.from, c.proto, c.to, c.what, c.pods...); err != nil {
			return err
		}
	}
	if err := eventually(ctx, func() error {
		if r := podA.Probe(ctx, testenv.TCP, empty, 1, testenv.ProbeOptions{}); !r.All(testenv.Refused) {
			return fmt.Errorf("a Service without endpoints does not refuse connections: %s", r)
		}
		return nil
	}); err != nil {
		return err
	}
	say("%-36s refused at once: it has no endpoints", "empty, from pod-a")
	return nil
}

// readyLine returns the line of a ready endpoint in examples/web.yaml.
func readyLine(address, node string) string {
	return fmt.Sprintf("  - %s, nodeName: %s}\n", readiness(address, true), node)
}

// readiness returns the beginning of an endpoint in examples/web.yaml.
func readiness(address string, ready bool) string {
	return fmt.Sprintf("{addresses: [%s], conditions: {ready: %t}", address, ready)
}

// hold toggles the readiness of an endpoint until the context ends.
func (w *world) hold(ctx context.Context, at sockets, log *agentLog) error {
	title("Running until Ctrl-C; in another terminal, try:")
	fmt.Printf("\n  go tool -modfile=internal/tools/grpcurl/go.mod grpcurl -plaintext -unix \\\n"+
		"    -d '{\"hello\": {}}' %s slicecast.v1.DistributionService/Stream\n"+
		"  bin/slicecast-server status --watch --debug-socket=%s\n"+
		"  bin/slicecast-agent status --watch --status-socket=%s\n\n", at.server, at.server, at.agent)
	log.printing.Store(true)
	for ready := false; ; ready = !ready {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(2 * time.Second):
		}
		if err := w.edit("web.yaml", readiness("10.180.1.1", !ready), readiness("10.180.1.1", ready)); err != nil {
			return err
		}
	}
}

// expect waits until exactly these pods receive connections, and prints how many each of them
// receives.
func (w *world) expect(ctx context.Context, from *testenv.Host, proto testenv.Proto, dst netip.AddrPort, what string, pods ...string) error {
	if err := eventually(ctx, func() error {
		result := from.Probe(ctx, proto, dst, 10*len(pods), testenv.ProbeOptions{})
		answered := result.Backends()
		if len(answered) != len(pods) || !result.All(testenv.Answered) {
			return fmt.Errorf("%s: %s", what, result)
		}
		for _, p := range pods {
			if answered[p] == 0 {
				return fmt.Errorf("%s: no connection reaches %s: %s", what, p, result)
			}
		}
		return nil
	}); err != nil {
		return err
	}
	answered := from.Probe(ctx, proto, dst, 100, testenv.ProbeOptions{}).Backends()
	var counts []string
	for _, p := range pods {
		counts = append(counts, fmt.Sprintf("%s %d", p, answered[p]))
	}
	say("%-36s %s", what, strings.Join(counts, ", "))
	return nil
}

// eventually waits for a condition, for at most the time of one step.
func eventually(ctx context.Context, condition func() error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return testenv.WaitFor(ctx, condition)
}

// edit replaces text in a manifest. Like an editor, it replaces the file in one step.
func (w *world) edit(name, old, now string) error {
	path := filepath.Join(w.manifests, name)
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if !strings.Contains(string(b), old) {
		return fmt.Errorf("%s does not contain %q", name, old)
	}
	if err := os.WriteFile(path+".new", []byte(strings.Replace(string(b), old, now, 1)), 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func title(format string, args ...any) { fmt.Printf("\n== "+format+"\n", args...) }
func say(format string, args ...any)   { fmt.Printf("   "+format+"\n", args...) }
