// This test proves that all nodes hold what the API says after etcd was stopped for half a minute,
// while pods and Services kept changing.
package e2e

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/testenv"
)

// TestEtcdOutage stops etcd for half a minute while pods and Services change. Afterwards all nodes
// must hold what the API says.
func TestEtcdOutage(t *testing.T) {
	const outage = 30 * time.Second
	c := newCluster(t)
	pods := c.Deployment("web", 6)
	web := c.Service("web", selecting("web", tcp("tcp", 80, onPodPort()), udp("udp", 80, onPodPort())))
	c.RequireAnswers(web, 80, pods...)
	o := c.Observe()
	connections := c.Connect(web, 80)
	prober := c.ProbeAllTheTime(web, 80)

	churn := c.startChurn(pods[1:])
	churn.AwaitChanges(50)
	require.NoError(t, c.cp.Etcd.Stop())
	connections.RequireAlive()
	before := churn.Changes()
	select {
	case <-time.After(outage):
	case <-t.Context().Done():
	}
	connections.RequireAlive()
	require.NoError(t, c.cp.Etcd.Start(t.Context()))
	churn.AwaitChanges(before + 50)
	churn.Stop()
	t.Logf("%d changes, %d of them after the outage; %d failed", churn.changes, churn.changes-before, churn.failures)

	c.AwaitTruth()
	o.AwaitTruth()
	connections.RequireAlive()
	prober.RequireNoFailure()
	for _, p := range pods {
		require.NoError(t, c.setReady(t.Context(), p.Name, true))
	}
	c.RequireAnswers(web, 80, pods...)
	o.AwaitTruth()
}

// churn continuously changes the readiness of pods and creates and deletes Services.
type churn struct {
	c      *cluster
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu                sync.Mutex // guards the fields below
	changes, failures int
}

// churnInterval is the time between two changes.
const churnInterval = 50 * time.Millisecond

func (c *cluster) startChurn(pods []*pod) *churn {
	c.t.Helper()
	ctx, cancel := context.WithCancel(c.t.Context())
	ch := &churn{c: c, cancel: cancel}
	ch.wg.Go(func() {
		pause := time.NewTicker(churnInterval)
		defer pause.Stop()
		for i := 0; ctx.Err() == nil; i++ {
			err := ch.change(ctx, pods, i)
			ch.mu.Lock()
			if err == nil {
				ch.changes++
			} else {
				ch.failures++
			}
			ch.mu.Unlock()
			select {
			case <-ctx.Done():
			case <-pause.C:
			}
		}
	})
	c.t.Cleanup(ch.Stop)
	return ch
}

// change makes change i. A failed change does not matter, because the test compares the final state
// with the API.
func (ch *churn) change(ctx context.Context, pods []*pod, i int) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	services := ch.c.api.CoreV1().Services(ch.c.namespace)
	name := fmt.Sprintf("churn-%d", i/8%4)
	switch i % 8 {
	case 0:
		_, err := services.Create(ctx, &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: selecting("web", tcp("http", 80, onPodPort())),
		}, metav1.CreateOptions{})
		return err
	case 7:
		// Delete a Service other than the newest, so that some exist at any time.
		return services.Delete(ctx, fmt.Sprintf("churn-%d", (i/8+2)%4), metav1.DeleteOptions{})
	default:
		return ch.c.setReady(ctx, pods[i%len(pods)].Name, i/len(pods)%2 == 0)
	}
}

// Changes returns the number of successful changes.
func (ch *churn) Changes() int {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	return ch.changes
}

// AwaitChanges waits until at least n changes were successful.
func (ch *churn) AwaitChanges(n int) {
	ch.c.t.Helper()
	testenv.Eventually(ch.c.t, time.Minute, func() error {
		if have := ch.Changes(); have < n {
			return fmt.Errorf("%d changes were successful, want %d", have, n)
		}
		return nil
	})
}

// Stop ends the churn.
func (ch *churn) Stop() {
	ch.cancel()
	ch.wg.Wait()
}
