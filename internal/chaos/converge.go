package chaos

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/cluster"
)

const (
	// convergeLimit bounds the time in which the nodes converge after a fault.
	convergeLimit = 2 * time.Minute
	// reachTimeout bounds one attempt to reach a new Service, and reachPause is the time between two.
	reachTimeout, reachPause = time.Second, 50 * time.Millisecond
	// settle is the time in which a difference in a kernel may end by itself.
	settle = time.Second
)

// convergence is how long the nodes took to do what the objects say.
type convergence struct {
	// Sliced is the time until a new Service had endpoints of both IP families. That is up to the
	// API server and its controllers.
	Sliced time.Duration
	// Reached is the time until all nodes and the Pods on them reached that Service.
	Reached time.Duration
	// Verified is the time until the comparison of all kernels with all objects began that found no
	// difference.
	Verified time.Duration
}

// converge waits until all nodes have programmed a Service that is new, and until their kernels do
// what all objects say.
func (r *run) converge(ctx context.Context, limit time.Duration) (took convergence, err error) {
	began := time.Now()
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not within %s", limit))
	defer cancel()
	r.markers++
	name := fmt.Sprintf("marker-%d", r.markers)
	r.churn.setService(name, "anchor")
	defer r.churn.setService(name, "")
	if err := r.awaitSlices(ctx, name); err != nil {
		return took, fmt.Errorf("a new Service gets no endpoints: %w", err)
	}
	took.Sliced = time.Since(began)
	if err := r.awaitReached(ctx, name); err != nil {
		return took, err
	}
	took.Reached = time.Since(began)
	var last []string // differences, which say more than that the last comparison was interrupted
	for {
		took.Verified = time.Since(began)
		differences, err := r.verify(ctx)
		if err == nil && len(differences) == 0 {
			return took, nil
		}
		if len(differences) > 0 {
			last = differences
		}
		if ctx.Err() != nil {
			return took, errors.Join(fmt.Errorf("%w: the kernels differ from the objects", context.Cause(ctx)), err,
				errors.New(strings.Join(last, "\n")))
		}
	}
}

// awaitSlices waits until a Service has endpoints of both IP families.
func (r *run) awaitSlices(ctx context.Context, name string) error {
	return testenv.WaitForEvery(ctx, reachPause, func() error {
		slices, err := r.Client.DiscoveryV1().EndpointSlices(namespace).List(ctx,
			metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + name})
		if err != nil {
			return err
		}
		families := map[discoveryv1.AddressType]bool{}
		for i := range slices.Items {
			families[slices.Items[i].AddressType] = len(slices.Items[i].Endpoints) > 0
		}
		if !families[discoveryv1.AddressTypeIPv4] || !families[discoveryv1.AddressTypeIPv6] {
			return fmt.Errorf("families with endpoints: %v", families)
		}
		return nil
	})
}

// awaitReached waits until all clients reach a Service.
func (r *run) awaitReached(ctx context.Context, name string) error {
	service, err := r.Client.CoreV1().Services(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	var all errgroup.Group
	for _, w := range waysTo(service, r.clients) {
		if w.network != "tcp" {
			continue
		}
		all.Go(func() error {
			return testenv.WaitForEvery(ctx, reachPause, func() error {
				_, err := w.ask(ctx, reachTimeout)
				return err
			})
		})
	}
	return all.Wait()
}

// verify compares the kernels of all nodes with all objects, and returns the differences. It runs
// "slicecast-agent verify", which judges the rules of kube-proxy, too.
func (r *run) verify(ctx context.Context) (differences []string, err error) {
	objects, err := r.Kubectl(ctx, "", "get", "services,endpointslices,servicecidrs,nodes", "--all-namespaces", "--output=json")
	if err != nil {
		return nil, err
	}
	var all errgroup.Group
	found := make([][]string, len(r.Nodes))
	for i, node := range r.Nodes {
		all.Go(func() (err error) {
			found[i], err = r.verifyNode(ctx, node, objects)
			return err
		})
	}
	err = all.Wait()
	return slices.Concat(found...), err
}

// verifyNode compares the kernel of a node, and returns the lines about differences.
func (r *run) verifyNode(ctx context.Context, node *cluster.Node, objects string) ([]string, error) {
	cmd := node.Host.Command(ctx, filepath.Join(r.Dir, "bin", "slicecast-agent"), "verify", "--objects=-", fmt.Sprintf("--settle=%s", settle),
		"--", "--node-name="+node.Name, "--cluster-cidr="+cluster.PodCIDRs)
	cmd.Stdin = strings.NewReader(objects)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err == nil || !errors.As(err, &exit) || exit.ExitCode() != 1 {
		if err != nil {
			err = fmt.Errorf("verify %s: %w\n%s", node.Name, err, out)
		}
		return nil, err
	}
	const shown = 10
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	return lines[:min(shown, len(lines))], nil
}

// services returns the ways to the Services of the traffic.
func (r *run) services(ctx context.Context) ([]way, error) {
	var ways []way
	for i := range deployments {
		service, err := r.Client.CoreV1().Services(namespace).Get(ctx, webName(i), metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		ways = append(ways, waysTo(service, r.clients)...)
	}
	return ways, nil
}
