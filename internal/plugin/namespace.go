package plugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	utilrand "k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"

	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/show"
)

const (
	// namespacePrefix is the beginning of the names of runs' namespaces.
	namespacePrefix = "slicecast-connectivity-"
	// runLabel is on all objects of a run. Its value is the run's name.
	runLabel = "slicecast.io/temporary-run"
	// expiresAnnotation on a run's namespace is when its Pods have ended by themselves.
	expiresAnnotation = "slicecast.io/temporary-run-expires"

	// cleanupTime bounds the removal of a run's namespace.
	cleanupTime = 2 * time.Minute
	// lateTime is how long a namespace may take to appear whose creation had no answer.
	lateTime = 30 * time.Second

	// cleanupCommand removes what killed commands have left.
	cleanupCommand = "kubectl slicecast connectivity --cleanup"
)

// progress prints what a command does, while it does it.
type progress struct {
	mu sync.Mutex // guards to
	to io.Writer
}

// say prints a line.
func (p *progress) say(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintln(p.to, show.Printable(fmt.Sprintf(format, args...)))
}

// temporaryNamespace is a namespace that a command creates for its Pods. Its removal removes
// everything that the command has created.
type temporaryNamespace struct {
	fleet    *fleet.Fleet
	progress *progress
	// id is the name of the run, and namespace that of its namespace.
	id, namespace string
	// uid is that of the namespace. nil means that the API server has not said that it created one.
	// uncertain is set if its answer, or a missing one, does not say whether it did.
	uid       *types.UID
	uncertain bool
}

func newTemporaryNamespace(f *fleet.Fleet, p *progress) *temporaryNamespace {
	id := utilrand.String(6)
	return &temporaryNamespace{fleet: f, progress: p, id: id, namespace: namespacePrefix + id}
}

// labels returns the labels of all objects of the run.
func (n *temporaryNamespace) labels() map[string]string {
	return map[string]string{runLabel: n.id, "app.kubernetes.io/managed-by": "kubectl-slicecast"}
}

// createNamespace creates the namespace, with a level of the Pod Security Standards, and the
// ServiceAccount of its Pods, which may run for lifetime. After an error there may be a namespace
// to remove.
func (n *temporaryNamespace) createNamespace(ctx context.Context, level string, lifetime time.Duration) error {
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: n.namespace, Labels: n.labels(), Annotations: map[string]string{expiresAnnotation: time.Now().Add(lifetime).UTC().Format(time.RFC3339)},
	}}
	namespace.Labels["pod-security.kubernetes.io/enforce"] = level
	core := n.fleet.Client().CoreV1()
	// An interruption must not leave open whether there is a namespace to remove.
	made, err := fleet.Within(context.WithoutCancel(ctx), n.fleet, func(ctx context.Context) (*corev1.Namespace, error) {
		return core.Namespaces().Create(ctx, namespace, metav1.CreateOptions{})
	})
	// Only an answer that refuses the request says that there is no namespace.
	var answer apierrors.APIStatus
	switch {
	case err == nil:
		n.uid = &made.UID
	case errors.As(err, &answer) && answer.Status().Code >= http.StatusBadRequest && answer.Status().Code < http.StatusInternalServerError:
		return fmt.Errorf("create the namespace %s: %w; docs/kubectl.md says which rights are needed", n.namespace, err)
	default:
		n.uncertain = true
		return fmt.Errorf("create the namespace %s: %w; if it exists later, run %s", n.namespace, err, cleanupCommand)
	}
	// The namespace's own ServiceAccount comes later, and Pods without one are refused.
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "probe", Labels: n.labels()}}
	if _, err := core.ServiceAccounts(n.namespace).Create(ctx, account, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create a ServiceAccount: %w", err)
	}
	return nil
}

// probeContainer is the name of the container in Pods that newPod returns.
const probeContainer = "probe"

// newPod returns a Pod on a node that runs a command of an agent's image. It has no token and no
// privileges, tolerates all taints, and ends by itself after lifetime.
func (n *temporaryNamespace) newPod(name, node, image string, lifetime time.Duration, command ...string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: n.labels()},
		Spec: corev1.PodSpec{
			NodeName: node, RestartPolicy: corev1.RestartPolicyNever,
			ServiceAccountName: "probe", AutomountServiceAccountToken: new(false), EnableServiceLinks: new(false),
			TerminationGracePeriodSeconds: new(int64(1)), ActiveDeadlineSeconds: new(int64(lifetime.Seconds())),
			Tolerations:     []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
			SecurityContext: &corev1.PodSecurityContext{SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
			Containers: []corev1.Container{{
				Name: probeContainer, Image: image, ImagePullPolicy: corev1.PullIfNotPresent, Command: command,
				Resources: corev1.ResourceRequirements{
					Requests: corev1.ResourceList{corev1.ResourceCPU: apiresource.MustParse("10m"), corev1.ResourceMemory: apiresource.MustParse("32Mi")},
					Limits:   corev1.ResourceList{corev1.ResourceMemory: apiresource.MustParse("256Mi")},
				},
				SecurityContext: &corev1.SecurityContext{
					AllowPrivilegeEscalation: new(false), ReadOnlyRootFilesystem: new(true), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
				},
			}},
		},
	}
}

// end removes the namespace at the end of a run, also if ctx has ended the run.
func (n *temporaryNamespace) end(ctx context.Context) error {
	if ctx.Err() != nil {
		n.progress.say("Interrupted: removing the namespace %s. Press Ctrl-C again to leave at once, and then run: %s", n.namespace, cleanupCommand)
	}
	err := n.removeNamespace(context.WithoutCancel(ctx))
	switch {
	case ctx.Err() == nil:
	case err != nil:
		n.progress.say("%v", err) // an interrupted command may print no report
	default:
		n.progress.say("Removed the namespace %s.", n.namespace)
	}
	return err
}

// removalError returns why a namespace may be left, and what to do next.
func removalError(namespace string, err error, next string) error {
	return fmt.Errorf("remove the namespace %s: %w; %s", namespace, err, next)
}

// removeNamespace removes the namespace of the run, if there is one. If it is uncertain whether the
// API server has created it, or still does, removeNamespace waits for it for a while.
func (n *temporaryNamespace) removeNamespace(ctx context.Context) error {
	switch {
	case n.uncertain:
		n.progress.say("The namespace %s may be created yet; waiting for up to %v to remove it", n.namespace, lateTime)
		late, cancel := context.WithTimeout(ctx, lateTime)
		defer cancel()
		// If it does not come, there is nothing to remove, and createNamespace's error says what to do
		// later.
		_ = awaitObjects(late, namespacesOf(n.fleet, n.namespace), func(found map[string]*corev1.Namespace) bool { return len(found) > 0 })
	case n.uid == nil:
		return nil
	}
	return remove(ctx, n.fleet, n.namespace, n.uid)
}

// removeLeft removes namespaces of earlier runs and returns their names: all of them, or those
// whose Pods have ended by themselves. Those may take cleanupTime together.
func removeLeft(ctx context.Context, f *fleet.Fleet, p *progress, all bool) ([]string, error) {
	list, err := fleet.List(ctx, f, f.Client().CoreV1().Namespaces().List, metav1.ListOptions{LabelSelector: runLabel})
	if err != nil {
		return nil, fmt.Errorf("find earlier runs: %w", err)
	}
	if !all {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, cleanupTime, errNotGone)
		defer cancel()
	}
	removed := []string{}
	for _, n := range list.Items {
		if !strings.HasPrefix(n.Name, namespacePrefix) {
			p.say("The namespace %s has the label %s, and is left alone: its name is not that of a run.", n.Name, runLabel)
			continue
		}
		if !all && n.DeletionTimestamp != nil {
			p.say("The namespace %s of an earlier run is not gone yet: %s", n.Name, cmp.Or(whyLeft(&n), "its removal has begun"))
			continue
		}
		expires, err := time.Parse(time.RFC3339, n.Annotations[expiresAnnotation])
		if !all && err == nil && time.Now().Before(expires) {
			p.say("Another run is active or was killed: namespace %s. If nobody needs it, remove it: %s", n.Name, cleanupCommand)
			continue
		}
		if err := remove(ctx, f, n.Name, &n.UID); err != nil && all {
			return removed, err
		} else if err != nil {
			p.say("%v", err)
			continue
		}
		removed = append(removed, n.Name)
	}
	return removed, nil
}

// errNotGone is the cause if the time for a removal is over.
var errNotGone = fmt.Errorf("it is not gone after %v", cleanupTime)

// remove deletes a namespace, if it has this UID, and waits until it is gone. A nil UID is any.
func remove(ctx context.Context, f *fleet.Fleet, name string, uid *types.UID) error {
	ctx, cancel := context.WithTimeoutCause(ctx, cleanupTime, errNotGone)
	defer cancel()
	namespaces := f.Client().CoreV1().Namespaces()
	err := namespaces.Delete(ctx, name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: uid}})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return removalError(name, err, "run "+cleanupCommand)
	}
	var why string
	err = awaitObjects(ctx, namespacesOf(f, name), func(left map[string]*corev1.Namespace) bool {
		why = whyLeft(left[name])
		return len(left) == 0
	})
	switch {
	case err == nil:
		return nil
	case why == "":
		return removalError(name, err, "it goes by itself once the API server has removed what is in it: kubectl describe namespace "+name)
	}
	return removalError(name, fmt.Errorf("%w; the API server says why: %.600s", err, why), "mend that, and it goes by itself")
}

// whyLeft returns what the API server says about a namespace that it cannot remove, such as that
// the objects of an aggregated API are unknown. It is empty if there is nothing.
func whyLeft(n *corev1.Namespace) string {
	if n == nil {
		return ""
	}
	var why []string
	for _, c := range n.Status.Conditions {
		if c.Status == corev1.ConditionTrue {
			why = append(why, fmt.Sprintf("%s (%s)", c.Message, c.Reason))
		}
	}
	return strings.Join(why, "; ")
}

func podReady(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// waiting returns what a Pod waits for, such as ErrImagePull.
func waiting(p *corev1.Pod) string {
	for _, c := range p.Status.ContainerStatuses {
		if w := c.State.Waiting; w != nil {
			return strings.TrimSpace(w.Reason + " " + w.Message)
		}
	}
	return string(p.Status.Phase)
}

func podsOf(f *fleet.Fleet, namespace string) cache.ListerWatcher {
	return cache.NewListWatchFromClient(f.Client().CoreV1().RESTClient(), "pods", namespace, fields.Everything())
}

func namespacesOf(f *fleet.Fleet, name string) cache.ListerWatcher {
	return cache.NewListWatchFromClient(f.Client().CoreV1().RESTClient(), "namespaces", "", fields.OneTermEqualSelector("metadata.name", name))
}

// object is an object of the API.
type object interface {
	metav1.Object
	runtime.Object
}

// awaitObjects waits until objects, by their names, satisfy a condition.
func awaitObjects[T object](ctx context.Context, from cache.ListerWatcher, satisfied func(map[string]T) bool) error {
	var kind T
	objects := map[string]T{}
	_, err := watchtools.UntilWithSync(ctx, from, kind, func(store cache.Store) (bool, error) {
		for _, one := range store.List() {
			if o, ok := one.(T); ok {
				objects[o.GetName()] = o
			}
		}
		return satisfied(objects), nil
	}, func(e watch.Event) (bool, error) {
		o, ok := e.Object.(T)
		if !ok {
			return false, nil
		}
		if objects[o.GetName()] = o; e.Type == watch.Deleted {
			delete(objects, o.GetName())
		}
		return satisfied(objects), nil
	})
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return err
}
