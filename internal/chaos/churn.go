package chaos

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/slicecast/slicecast/internal/testenv/cluster"
)

const (
	// namespace is that of everything that changes.
	namespace = "chaos"
	// steady is the Service of the Deployment that never changes.
	steady = "web-2"
	// serverImage has the server of internal/probe. All nodes have it, whatever their proxy is.
	serverImage = "ghcr.io/slicecast/slicecast-agent-iptables:" + cluster.OwnTag
	// lingerSeconds is how long a Pod serves after its end has begun. Requests that reach it after
	// [Grace] count as misrouted, and those after its end as lost.
	lingerSeconds = 25
)

// deploymentOf is a Deployment. Its arguments are its name, its number of replicas, and the number
// of its latest rollout.
var deploymentOf = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: %[1]s}
spec:
  replicas: %[2]d
  selector: {matchLabels: {app: %[1]s}}
  strategy: {rollingUpdate: {maxSurge: 1, maxUnavailable: 0}}
  template:
    metadata: {labels: {app: %[1]s}, annotations: {rollout: "%[3]d"}}
    spec: ` + serverPod

// anchors are Pods on all nodes that never change. The Services by which convergence is measured
// lead to them.
var anchors = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: anchor}
spec:
  selector: {matchLabels: {app: anchor}}
  template:
    metadata: {labels: {app: anchor}}
    spec: ` + serverPod

var serverPod = fmt.Sprintf(`
      terminationGracePeriodSeconds: %d
      containers:
      - name: server
        image: %s
        command: [/usr/local/bin/slicecast-agent, probe, serve, --name=$(POD_NAME), --port=%d]
        env: [{name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]
        lifecycle: {preStop: {sleep: {seconds: %d}}}
        # On a busy machine the Pods get enough time to answer.
        resources: {requests: {cpu: 100m}}
        readinessProbe: {httpGet: {path: /ready, port: 8078}, periodSeconds: 1, timeoutSeconds: 10}
`, lingerSeconds+10, serverImage, port, lingerSeconds)

// serviceOf is a Service. Its arguments are its name and the name of its Pods' app.
const serviceOf = `
apiVersion: v1
kind: Service
metadata: {name: %[1]s}
spec:
  ipFamilyPolicy: RequireDualStack
  selector: {app: %[2]s}
  ports:
  - {name: tcp, port: 8080, protocol: TCP}
  - {name: udp, port: 8080, protocol: UDP}
`

// paperService is a Service without a selector.
const paperService = `
apiVersion: v1
kind: Service
metadata: {name: %[1]s}
spec: {ports: [{name: http, port: 80, targetPort: 8080}]}
`

// paperSlice is its only slice. The arguments are its name and its endpoints.
const paperSlice = `
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %[1]s, labels: {kubernetes.io/service-name: %[1]s}}
addressType: IPv4
ports: [{name: http, port: 8080, protocol: TCP}]
endpoints: [%[2]s]
`

// object identifies an object of the namespace.
type object struct{ kind, name string }

// churn holds the objects that should exist, and writes those that do not exist as they should. It
// writes them again and again until the API server accepts them, so that what an outage delays is
// made up for afterwards.
type churn struct {
	client kubernetes.Interface
	// signal has room for one element, which wakes run.
	signal chan struct{}

	mu    sync.Mutex        // guards all fields below
	want  map[object]string // manifests; an empty one means that the object should not exist
	dirty map[object]bool
	state [deployments]struct{ replicas, rollouts int }
}

func newChurn(client kubernetes.Interface) *churn {
	c := &churn{client: client, signal: make(chan struct{}, 1), want: map[object]string{}, dirty: map[object]bool{}}
	c.set(object{"DaemonSet", "anchor"}, anchors)
	for i := range deployments {
		name := webName(i)
		c.state[i].replicas = 3
		c.deploy(i)
		c.set(object{"Service", name}, fmt.Sprintf(serviceOf, name, name))
	}
	return c
}

func webName(i int) string { return fmt.Sprintf("web-%d", i) }

func (c *churn) deploy(i int) {
	state := c.state[i]
	c.set(object{"Deployment", webName(i)}, fmt.Sprintf(deploymentOf, webName(i), state.replicas, state.rollouts))
}

// set sets what an object should be.
func (c *churn) set(o object, manifest string) { c.want[o], c.dirty[o] = manifest, true }

// do changes what should exist.
func (c *churn) do(change Change) {
	c.mu.Lock()
	defer c.mu.Unlock()
	paper := fmt.Sprintf("paper-%d", change.Object)
	slice := object{"EndpointSlice", paper}
	switch change.Action {
	case Scale:
		c.state[change.Object].replicas = change.Value
		c.deploy(change.Object)
	case Roll:
		c.state[change.Object].rollouts++
		c.deploy(change.Object)
	case Create:
		c.set(object{"Service", paper}, fmt.Sprintf(paperService, paper))
		c.set(slice, fmt.Sprintf(paperSlice, paper, paperEndpoints(change)))
	case Move:
		c.set(slice, fmt.Sprintf(paperSlice, paper, paperEndpoints(change)))
	case Delete:
		c.set(object{"Service", paper}, "")
		c.set(slice, "")
	}
	c.wake()
}

// paperEndpoints returns endpoints that no Pod has. Which ones depends on the change, so that a
// slice that changes loses some and gets others.
func paperEndpoints(change Change) string {
	list := make([]string, change.Value)
	for i := range list {
		list[i] = fmt.Sprintf("{addresses: [10.181.%d.%d], conditions: {ready: true}}", change.Object%256, 1+(i+change.Value)%250)
	}
	return strings.Join(list, ", ")
}

// setService sets the Service of a measurement, or removes it if there is no app.
func (c *churn) setService(name, app string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	manifest := ""
	if app != "" {
		manifest = fmt.Sprintf(serviceOf, name, app)
	}
	c.set(object{"Service", name}, manifest)
	c.wake()
}

// renewAll has all objects written again, after the cluster has lost some.
func (c *churn) renewAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for o := range c.want {
		c.dirty[o] = true
	}
	c.wake()
}

func (c *churn) wake() {
	select {
	case c.signal <- struct{}{}:
	default:
	}
}

// retryPause is the time after which objects are written again that the API server did not accept.
const retryPause = time.Second

// run writes objects until ctx ends.
func (c *churn) run(ctx context.Context) {
	ticker := time.NewTicker(retryPause)
	defer ticker.Stop()
	for {
		_ = c.write(ctx) // what fails is tried again
		select {
		case <-ctx.Done():
			return
		case <-c.signal:
		case <-ticker.C:
		}
	}
}

// write writes the objects that are not as they should be.
func (c *churn) write(ctx context.Context) error {
	c.mu.Lock()
	dirty := slices.SortedFunc(maps.Keys(c.dirty), func(a, b object) int {
		return strings.Compare(a.kind+a.name, b.kind+b.name)
	})
	c.mu.Unlock()
	var errs []error
	for _, o := range dirty {
		c.mu.Lock()
		manifest := c.want[o]
		c.mu.Unlock()
		if err := c.put(ctx, o, manifest); err != nil {
			errs = append(errs, fmt.Errorf("%s %s: %w", o.kind, o.name, err))
			continue
		}
		c.mu.Lock()
		if c.want[o] == manifest {
			delete(c.dirty, o)
		}
		c.mu.Unlock()
	}
	return errors.Join(errs...)
}

// putTimeout bounds a request. An API server that hangs must not hold up the churn for long.
const putTimeout = 5 * time.Second

// put applies or deletes an object.
func (c *churn) put(ctx context.Context, o object, manifest string) (err error) {
	ctx, cancel := context.WithTimeout(ctx, putTimeout)
	defer cancel()
	force := true
	apply := metav1.PatchOptions{FieldManager: "chaos", Force: &force}
	core, apps, slices := c.client.CoreV1().Services(namespace), c.client.AppsV1(), c.client.DiscoveryV1().EndpointSlices(namespace)
	switch body := []byte(manifest); {
	case manifest == "" && o.kind == "Service":
		err = core.Delete(ctx, o.name, metav1.DeleteOptions{})
	case manifest == "" && o.kind == "EndpointSlice":
		err = slices.Delete(ctx, o.name, metav1.DeleteOptions{})
	case o.kind == "Service":
		_, err = core.Patch(ctx, o.name, types.ApplyYAMLPatchType, body, apply)
	case o.kind == "EndpointSlice":
		_, err = slices.Patch(ctx, o.name, types.ApplyYAMLPatchType, body, apply)
	case o.kind == "Deployment":
		_, err = apps.Deployments(namespace).Patch(ctx, o.name, types.ApplyYAMLPatchType, body, apply)
	case o.kind == "DaemonSet":
		_, err = apps.DaemonSets(namespace).Patch(ctx, o.name, types.ApplyYAMLPatchType, body, apply)
	default:
		err = fmt.Errorf("objects of kind %s cannot be written: add it here", o.kind)
	}
	if manifest == "" && apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
