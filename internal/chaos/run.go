package chaos

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/cluster"
	"github.com/slicecast/slicecast/internal/testenv/repository"
)

const (
	// nodes and servers are the numbers of both. Two servers are the chart's default.
	nodes, servers = 3, 2
	// baseline is the time of traffic before the first fault, and calm that after the last one, when
	// nothing changes any more and no request may be lost.
	baseline, calm = 10 * time.Second, 20 * time.Second
	// mendLimit bounds the time in which nodes converge once their proxies were started again.
	mendLimit = time.Minute
	// startPatience bounds the time in which a new cluster serves traffic.
	startPatience = 5 * time.Minute
)

// Options configure a run.
type Options struct {
	// Proxy is cluster.Slicecast or cluster.KubeProxy.
	Proxy cluster.Proxy
	// Programmer is how the proxy programs the kernel: nftables, which empty means, or iptables.
	Programmer string
	Plan       Plan
	// Logf receives a line for each step. It must not be nil.
	Logf func(format string, args ...any)
}

// run is a plan that is carried out.
type run struct {
	*cluster.Cluster
	options Options
	churn   *churn
	clients []*testenv.Host
	ledger  *ledger
	tally   *tally
	markers int // the number of Services by which convergence was measured
	report  *Report
}

// Run starts a cluster, carries out a plan in it, and stops the cluster. Failures of the report say
// what went wrong in the cluster. An error means that the plan could not be carried out. The report
// then has what happened before.
func Run(ctx context.Context, options Options) (*Report, error) {
	options.Programmer = cmp.Or(options.Programmer, "nftables")
	c, err := cluster.Start(ctx, cluster.Options{Nodes: nodes, Programmer: options.Programmer, Logf: options.Logf})
	if err != nil {
		return nil, err
	}
	r := &run{
		Cluster: c, options: options, churn: newChurn(c.Client),
		ledger: &ledger{gone: map[string]time.Time{}}, tally: &tally{}, report: newReport(options),
	}
	err = r.carryOut(ctx)
	return r.report, errors.Join(err, c.Stop())
}

// carryOut does everything in a new cluster.
func (r *run) carryOut(ctx context.Context) error {
	if err := r.install(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var background sync.WaitGroup
	defer background.Wait()
	defer cancel()
	background.Go(func() { r.churn.run(ctx) })
	r.clients = addClients(r.Cluster)
	if err := r.ledger.look(ctx, r.Cluster, namespace); err != nil {
		return err
	}
	background.Go(func() {
		// While the API server is away, nothing changes.
		every(ctx, keepInterval, func() { _ = r.ledger.look(ctx, r.Cluster, namespace) })
	})
	if _, err := r.converge(ctx, startPatience); err != nil {
		return fmt.Errorf("before the first fault: %w", err)
	}
	ways, err := r.services(ctx)
	if err != nil {
		return err
	}
	for _, w := range ways {
		limited, stop := context.WithTimeout(ctx, startPatience)
		err := testenv.WaitForEvery(limited, reachPause, func() error {
			_, err := w.ask(limited, reachTimeout)
			return err
		})
		stop()
		if err != nil {
			return fmt.Errorf("before the first fault: %w", err)
		}
	}

	began := time.Now()
	r.tally.window(&r.report.Baseline.Counts, &r.report.Baseline.Errors)
	sending, stopSending := context.WithCancel(ctx)
	defer stopSending()
	t := &traffic{ledger: r.ledger, tally: r.tally}
	t.start(sending, ways)
	r.options.Logf("traffic begins: %d ways", len(ways))
	if err := pause(ctx, baseline); err != nil {
		return err
	}
	changing, stopChanging := context.WithCancel(ctx)
	defer stopChanging()
	var changes sync.WaitGroup
	changes.Go(func() { r.change(changing) })
	err = r.steps(ctx)
	stopChanging()
	changes.Wait()
	if err == nil {
		err = r.end(ctx)
	}
	// Requests that are on their way still count.
	r.tally.window(&Counts{}, &[]string{})
	err = errors.Join(err, pause(ctx, answerTimeout))
	stopSending()
	t.wg.Wait()
	r.report.finish(time.Since(began))
	return err
}

// install installs the proxy and the Pods of the traffic.
func (r *run) install(ctx context.Context) (err error) {
	for _, node := range r.Nodes {
		if err := mountState(ctx, node); err != nil {
			return err
		}
	}
	switch r.options.Proxy {
	case cluster.Slicecast:
		root, err := repository.Root()
		if err != nil {
			return err
		}
		if err := r.InstallSlicecast(ctx, filepath.Join(root, "deploy", "kubernetes"), nil); err != nil {
			return err
		}
	case cluster.KubeProxy:
		if err := r.InstallKubeProxy(ctx); err != nil {
			return err
		}
		if err := r.AwaitRollout(ctx, "kube-system", "daemonset/kube-proxy"); err != nil {
			return err
		}
	default:
		return fmt.Errorf("proxy %q: choose %s or %s", r.options.Proxy, cluster.Slicecast, cluster.KubeProxy)
	}
	_, err = r.Client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	if err := testenv.WaitForEvery(limited, retryPause, func() error { return r.churn.write(limited) }); err != nil {
		return err
	}
	for i := range deployments {
		if err := r.AwaitRollout(ctx, namespace, "deployment/"+webName(i)); err != nil {
			return err
		}
	}
	return r.AwaitRollout(ctx, namespace, "daemonset/anchor")
}

// change makes the changes of the plan at their times, until ctx ends.
func (r *run) change(ctx context.Context) {
	began := time.Now()
	for _, c := range r.options.Plan.Changes {
		if pause(ctx, time.Until(began.Add(c.At))) != nil {
			return
		}
		r.churn.do(c)
		r.tally.mu.Lock()
		r.report.Changes++
		r.tally.mu.Unlock()
	}
}

// steps carries out all faults. A fault waits for its time, and until the nodes have converged
// after the one before.
func (r *run) steps(ctx context.Context) error {
	began := time.Now()
	quiet := &r.report.Quiet
	for i, step := range r.options.Plan.Steps {
		if err := pause(ctx, time.Until(began.Add(step.At))); err != nil {
			return err
		}
		result := &StepResult{Fault: step.Fault, At: seconds(time.Since(began))}
		r.report.Steps = append(r.report.Steps, result)
		r.tally.window(&result.Counts, &result.Errors)
		if err := r.step(ctx, step, result); err != nil {
			return fmt.Errorf("fault %s on %s: %w", step.Fault, result.Hit, err)
		}
		r.tally.window(&quiet.Counts, &quiet.Errors)
		r.options.Logf("%d of %d  %s", i+1, len(r.options.Plan.Steps), result.line(r.tally.read(&result.Counts)))
	}
	return pause(ctx, time.Until(began.Add(r.options.Plan.Duration)))
}

// step carries out a fault and waits until the nodes have converged.
func (r *run) step(ctx context.Context, step Step, result *StepResult) error {
	fault := faultNamed(step.Fault)
	if fault.SlicecastOnly && r.options.Proxy != cluster.Slicecast {
		result.Skipped = true
		return pause(ctx, step.Lasts)
	}
	hit, end, err := fault.begin(ctx, r, step.Target)
	result.Hit = hit
	if err != nil {
		r.report.fail("%s on %s: the fault could not be caused: %v", step.Fault, hit, err)
		r.options.Logf("%s: the fault could not be caused: %v", step.Fault, err)
	}
	if err := pause(ctx, step.Lasts); err != nil {
		return err
	}
	if end != nil && err == nil {
		if err := end(); err != nil {
			return err
		}
	}
	took, err := r.converge(ctx, convergeLimit)
	result.set(took)
	if err == nil || ctx.Err() != nil {
		return ctx.Err()
	}
	result.Unconverged = err.Error()
	r.report.fail("%s on %s: the nodes did not converge within %s: %v", step.Fault, hit, convergeLimit, err)
	r.options.Logf("%s: the nodes have not converged: %v", step.Fault, err)
	return r.mend(ctx)
}

// mend does what an operator would do for nodes that do not converge: it starts their proxies
// again.
func (r *run) mend(ctx context.Context) error {
	found, err := r.processes(r.Nodes, r.proxyCommand())
	for _, p := range found {
		err = errors.Join(err, p.kill(ctx))
	}
	if err != nil {
		return err
	}
	if _, err := r.converge(ctx, mendLimit); err != nil {
		r.report.fail("not even once the proxies were started again: %v", err)
	}
	return ctx.Err()
}

// end requires that the nodes converge once the cluster is left alone, and that no request is then
// lost or misrouted.
func (r *run) end(ctx context.Context) error {
	took, err := r.converge(ctx, convergeLimit)
	if err != nil {
		r.report.fail("after all faults: %v", err)
	}
	r.report.Converged = seconds(took.Verified)
	// Pods that have just ended count as they did before.
	if err := pause(ctx, lingerSeconds*time.Second); err != nil {
		return err
	}
	last := &r.report.Calm
	r.tally.window(&last.Counts, &last.Errors)
	if err := pause(ctx, calm); err != nil {
		return err
	}
	r.options.Logf("the end: converged in %s; then %+v", took.Verified.Round(time.Millisecond), r.tally.read(&last.Counts))
	return nil
}

// pause waits, and returns an error if ctx ends first.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
		return nil
	}
}
