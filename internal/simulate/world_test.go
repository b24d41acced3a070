// This file is a simulated cluster with everything in it, and what it has done.
package simulate

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
)

const (
	// settleTime is the stated time after which, once everything is well again, every node has
	// programmed the present state. See docs/design/simulation.md for what it is made of.
	settleTime = 3 * time.Minute
	// keptObservations bounds how much of what has happened is kept.
	keptObservations = 4000
)

// world is a simulated cluster. The scheduler's goroutine uses it, except where fields say
// otherwise.
type world struct {
	rand     *rand.Rand // draws what the cluster is like; the schedule has its own
	begin    time.Time
	network  *network
	cluster  *cluster
	apis     []*apiServer
	servers  []*server
	nodes    []*node
	operator *process
	pki      *pki // nil if the cluster does not use TLS
	shards   uint32

	convergence convergence
	graves      sync.WaitGroup // what was killed or stopped, until it has ended
	backups     []*saved
	// gaveUpBefore is what gaveUp returned after the last quiet time.
	gaveUpBefore float64
	slowest      time.Duration // the longest time that it took to settle
	faults       int           // steps that were faults and had an effect
	// missed means that the present step is a fault that happens to have no effect.
	missed bool

	// excused means that nodes may go back in time until the next quiet time, because the cluster's
	// state has. The cluster's mutex guards it.
	excused bool
	// lowered means that a restore has lowered the cluster's resource versions.
	lowered bool

	mu           sync.Mutex             // guards the fields below
	forms        map[string]form        // of servers and relays, by host
	liars        map[string]lie         // servers and relays that lie, by host
	deceived     map[string]bool        // names of liars and of who has believed them
	registries   []*prometheus.Registry // of all servers that have run
	observations []string
	digest       uint64 // a hash of all observations
	violation    string // the first one; empty while there is none
	kind         string // of the violation, without names and numbers
}

// violated notes that an invariant does not hold. Only the first violation counts. If the first
// argument names somebody who was deceived, none does.
func (w *world) violated(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	name, _ := args[0].(string)
	w.mu.Lock()
	deceived := w.deceived[name]
	w.mu.Unlock()
	if deceived {
		return
	}
	w.observed("VIOLATION: %s", text)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.violation == "" {
		w.violation, w.kind = text, format
	}
}

func (w *world) failed() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.violation
}

// observed notes what happened.
func (w *world) observed(format string, args ...any) {
	line := fmt.Sprintf("%11.6fs ", time.Since(w.begin).Seconds()) + fmt.Sprintf(format, args...)
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range len(line) {
		w.digest = (w.digest ^ uint64(line[i])) * 1099511628211
	}
	if len(w.observations) == keptObservations {
		w.observations = append(w.observations[:0], w.observations[keptObservations/2:]...)
	}
	w.observations = append(w.observations, line)
}

// bury ends what belongs to a process that was killed, in the background.
func (w *world) bury(cancel context.CancelFunc, running *sync.WaitGroup) {
	cancel()
	w.graves.Go(running.Wait)
}

// mayGoBack reports whether nodes may go back in time: because the cluster's state has, or because
// a server has given up waiting for state that a client had seen.
func (w *world) mayGoBack() bool { return w.excused || w.gaveUp() > w.gaveUpBefore }

var plaintext = []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}

// addressesFor returns the servers that a node is configured with: relays if there are any, except
// for every third node.
func (w *world) addressesFor(n *node) []string {
	return w.addresses(w.hasRelays() && n.host[len(n.host)-1]%3 != 0)
}

func newWorld(r *rand.Rand, directory string) *world {
	w := &world{rand: r, begin: time.Now(), network: newNetwork(), cluster: newCluster(), digest: 14695981039346656037, forms: make(map[string]form), liars: make(map[string]lie), deceived: make(map[string]bool)}
	w.convergence.nodes = make(map[nodeShard][]acknowledged)
	w.shards = pick([]uint32{4, 4, 64}, r.Uint32()) // a Service may be alone in its shard
	w.operator = w.network.process("10.0.4.1")
	if r.IntN(4) == 0 {
		w.pki = newPKI(w, directory)
	}
	for i := range 1 + r.IntN(2) {
		a := &apiServer{etcd: w.cluster.etcd, address: address("10.0.9.%d", i+1, 6443), network: w.network, plain: r.IntN(3) == 0}
		w.apis = append(w.apis, a)
	}
	roots := pick([]int{1, 2, 2, 3}, r.Uint32())
	for i := range roots {
		w.servers = append(w.servers, &server{
			world: w, name: fmt.Sprint("server-", i), address: address("10.0.1.%d", i+1, serverPort), api: w.apis[i%len(w.apis)],
		})
	}
	for i := range pick([]int{0, 0, 1, 2}, r.Uint32()) {
		w.servers = append(w.servers, &server{
			world: w, name: fmt.Sprint("relay-", i), address: address("10.0.2.%d", i+1, serverPort), relayed: true,
		})
	}
	for i := range pick([]int{2, 2, 3, 4}, r.Uint32()) {
		name := fmt.Sprint("node-", i)
		w.addNode(name, i)
		w.nodes = append(w.nodes, &node{
			world: w, host: fmt.Sprintf("10.0.3.%d", i+1), name: name, kernel: newKernel(w, name), disk: newDisk(),
		})
	}
	for i := range maxServices / 2 {
		w.cluster.set(w.cluster.services[i], w.drawService(r.Uint32()), nil)
		w.cluster.set(w.cluster.slices[i][0], nil, &sliceState{endpoints: map[int]bool{0: true, 1: true}})
	}
	w.drawForms(r.Uint32())
	for _, a := range w.apis {
		a.start()
	}
	for _, s := range w.servers {
		s.start()
	}
	for _, n := range w.nodes {
		n.start()
	}
	return w
}

func (w *world) addNode(name string, i int) {
	w.cluster.setNode(name, func(n *corev1.Node) {
		n.Labels = map[string]string{corev1.LabelTopologyZone: fmt.Sprint("zone-", i%2)}
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: fmt.Sprintf("10.0.3.%d", i+1)}}
		n.Spec.PodCIDRs = []string{fmt.Sprintf("10.244.%d.0/24", i)}
		n.Spec.PodCIDR = n.Spec.PodCIDRs[0]
	})
}

// end ends everything.
func (w *world) end() {
	for _, n := range w.nodes {
		n.kill()
	}
	for _, s := range w.servers {
		s.kill()
	}
	for _, a := range w.apis {
		a.kill()
	}
	w.operator.kill()
	w.graves.Wait()
}

// heal ends all faults.
func (w *world) heal() {
	w.network.heal()
	w.liftLimits()
	w.replaceStarved()
	w.endLies()
	w.setClocks()
	w.renewCertificates()
	for _, a := range w.apis {
		if a.process.hasEnded() {
			a.start()
		}
		a.hold(false)
		a.beStale(nil)
		a.beEndless(false)
	}
	for _, s := range w.servers {
		w.network.power(s.host(), true)
		if s.life == nil {
			s.start()
		}
	}
	for i, n := range w.nodes {
		w.network.power(n.host, true)
		n.kernel.mu.Lock()
		n.kernel.next, n.kernel.slow = nil, 0
		n.kernel.mu.Unlock()
		n.disk.mu.Lock()
		n.disk.full = false
		n.disk.mu.Unlock()
		if w.cluster.nodes[n.name] == nil {
			w.addNode(n.name, i)
		}
		if n.agent == nil {
			n.start()
		}
	}
}

// quiet ends all faults, and checks that every node has programmed the present state in time.
func (w *world) quiet() {
	w.heal()
	begin := time.Now()
	for {
		err := w.differs()
		if err == nil {
			err = w.diverges()
		}
		switch took := time.Since(begin); {
		case w.failed() != "":
			return
		case err == nil:
			w.slowest = max(w.slowest, took)
			w.observed("settled after %v", took)
			w.calm()
			return
		case took > settleTime:
			w.violated("%v after everything is well, %v", took, err)
			return
		}
		w.pass(time.Second)
	}
}

// calm checks what holds once every node has the present state.
func (w *world) calm() {
	w.undeceive()
	w.pass(6 * time.Second) // until the last acks are sent
	w.checkAcked()
	for _, s := range w.servers {
		w.compareConvergence(s)
	}
	if n, most := runtime.NumGoroutine(), w.mostGoroutines(); n > most {
		w.violated("%d goroutines, and %d are enough", n, most)
	}
	gaveUp := w.gaveUp()
	w.cluster.mu.Lock()
	defer w.cluster.mu.Unlock()
	w.excused, w.gaveUpBefore = false, gaveUp
}

func (w *world) checkAcked() {
	for _, n := range w.nodes {
		if n.agent != nil {
			n.agent.checkAcked()
		}
	}
}

// mostGoroutines bounds the goroutines of everything that runs.
func (w *world) mostGoroutines() int {
	return 50 + 60*len(w.servers) + 40*len(w.nodes) + 40*len(w.apis)
}

func (w *world) differs() error {
	var errs []error
	for _, n := range w.nodes {
		if err := n.kernel.differs(w.cluster.want(n.name, n.viewOptions(), n.form), n.form); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", n.name, err))
		}
	}
	return errors.Join(errs...)
}
