// These tests prove that explain waits for a change that is on its way, and that it never answers
// for the past without saying so. They also prove that the first step that does not agree or was
// not judged is the one to look at, and that Pods say why a Service has no endpoint.
package plugin

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

func TestSettled(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		// asked are the answers, of which the last one is repeated.
		asked []func(*explainReport)
		times int
		took  time.Duration
		code  int
	}{
		"all agrees":         {[]func(*explainReport){func(*explainReport) {}}, 1, 0, fine},
		"differs at first":   {[]func(*explainReport){func(r *explainReport) { r.steps[0].differs("x") }, func(*explainReport) {}}, 2, 0, fine},
		"differs":            {[]func(*explainReport){func(r *explainReport) { r.steps[0].differs("x") }}, 2, 0, wrong},
		"is not judged":      {[]func(*explainReport){func(r *explainReport) { r.steps[0].notJudged("x") }}, 1, 0, incomplete},
		"is on its way":      {[]func(*explainReport){func(r *explainReport) { r.moving = true }, func(r *explainReport) { r.moving = true }, func(*explainReport) {}}, 3, 2 * explainPause, fine},
		"is acknowledged":    {[]func(*explainReport){func(r *explainReport) { r.late = true }, func(*explainReport) {}}, 2, explainPause, fine},
		"is late":            {[]func(*explainReport){func(r *explainReport) { r.late = true }}, 11, explainSettle, wrong},
		"does not arrive":    {[]func(*explainReport){func(r *explainReport) { r.moving = true; r.steps[0].differs("x") }}, 11, explainSettle, wrong},
		"changes all along":  {[]func(*explainReport){func(r *explainReport) { r.moving = true; r.steps[0].notJudged("x") }}, 11, explainSettle, incomplete},
		"differs, then late": {[]func(*explainReport){func(r *explainReport) { r.steps[0].differs("x") }, func(r *explainReport) { r.late = true }, func(*explainReport) {}}, 3, explainPause, fine},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				times, begin := 0, time.Now()
				r, err := settled(t.Context(), func() (*explainReport, error) {
					r := &explainReport{question: question("web")}
					r.step(nodeStep)
					c.asked[min(times, len(c.asked)-1)](r)
					times++
					return r, nil
				})
				require.NoError(t, err)
				require.Equal(t, c.times, times)
				require.Equal(t, c.took, time.Since(begin))
				require.Equal(t, c.code, r.code())
				if r.late {
					require.Contains(t, printed(t, r), "! node-x has not acknowledged the latest version of the Service yet\n")
				}
			})
		})
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	stop := errors.New("stop")
	_, err := settled(ctx, func() (*explainReport, error) {
		cancel(stop)
		return &explainReport{moving: true}, nil
	})
	require.ErrorIs(t, err, stop)
}

func TestLookAt(t *testing.T) {
	t.Parallel()
	r := &explainReport{question: question("web")}
	r.step("first")
	r.step("second").notJudged("nobody answers")
	r.step("third").differs("it lacks something")
	require.Contains(t, printed(t, r), "Look at step 2 (second), which was not judged: nobody answers\n")
	r.steps[0].differs("it is gone")
	require.Contains(t, printed(t, r), "Look at step 1 (first): it is gone\n")
	require.Equal(t, incomplete, r.code())
}

// TestUnchanged proves that what changes while it is explained is noticed.
func TestUnchanged(t *testing.T) {
	e := newEnvironment(t)
	e.service("changing")
	q := question("changing")
	o, err := readExplained(t.Context(), plane.Client(), q)
	require.NoError(t, err)
	ask := func() *explainReport {
		r := &explainReport{question: q}
		r.objects(o)
		r.unchanged(t.Context(), plane.Client(), o)
		return r
	}
	require.NotContains(t, printed(t, ask()), "have changed while they were explained")
	slices := plane.Client().DiscoveryV1().EndpointSlices("default")
	s, err := slices.Get(t.Context(), "changing-1", metav1.GetOptions{})
	require.NoError(t, err)
	s.Endpoints = nil
	_, err = slices.Update(t.Context(), s, metav1.UpdateOptions{})
	require.NoError(t, err)
	r := ask()
	require.True(t, r.moving)
	require.Contains(t, printed(t, r), "! the Service or its EndpointSlices have changed while they were explained: run the command again\n")
}

func TestExplainPods(t *testing.T) {
	e := newEnvironment(t)
	q := question("waiting")
	selected := map[string]string{"app": "waiting"}
	o := &explained{service: &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "waiting"}, Spec: corev1.ServiceSpec{Selector: selected}}}
	ask := func(client kubernetes.Interface) string {
		r := &explainReport{question: q}
		r.objects(o)
		r.pods(t.Context(), client, o)
		return printed(t, r)
	}
	require.Contains(t, ask(plane.Client()), "No endpoint of default/waiting is usable: no Pod has the labels app=waiting\n")

	e.change = func(p *corev1.Pod) { p.Labels = selected }
	pod := e.pod("default", "waiting-1", "", "web", "", nil, corev1.PodPending)
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "Unschedulable", Message: "0/3 nodes are available"}}
	pods := plane.Client().CoreV1().Pods("default")
	_, err := pods.UpdateStatus(t.Context(), pod, metav1.UpdateOptions{})
	require.NoError(t, err)
	pod = e.pod("default", "waiting-2", "", "web", "node-x", nil, corev1.PodRunning)
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionFalse, Reason: "ContainersNotReady", Message: "containers with unready status: [web]"}}
	pod, err = pods.UpdateStatus(t.Context(), pod, metav1.UpdateOptions{})
	require.NoError(t, err)
	const pending = "No endpoint of default/waiting is usable: Pod waiting-1 is Pending (Unschedulable: 0/3 nodes are available)"
	require.Contains(t, ask(plane.Client()), pending+"; Pod waiting-2 is Running, but not ready (ContainersNotReady: containers with unready status: [web])\n")
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "web", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}}}}
	_, err = pods.UpdateStatus(t.Context(), pod, metav1.UpdateOptions{})
	require.NoError(t, err)
	require.Contains(t, ask(plane.Client()), pending+"; Pod waiting-2 is Running, and its container web waits (CrashLoopBackOff)\n")

	// A user without the right to list Pods has the rest of the explanation.
	config := rest.CopyConfig(plane.AdminConfig())
	config.Impersonate = rest.ImpersonationConfig{UserName: "nobody"}
	client, err := kubernetes.NewForConfig(config)
	require.NoError(t, err)
	text := ask(client)
	require.Contains(t, text, "no endpoint is usable; why its Pods are not is not known: pods is forbidden")
	require.Contains(t, text, "1. objects in the API server: ")
	require.NotContains(t, text, "waiting-1")

	// Nobody asks for the Pods of a Service that has an endpoint.
	o.slices = []discoveryv1.EndpointSlice{{Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.1.2.3"}}}}}
	require.NotContains(t, ask(client), "endpoint is usable")
	o.slices[0].Endpoints[0].Conditions = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true), Terminating: new(true)}
	require.NotContains(t, ask(client), "endpoint is usable")
	o.slices[0].Endpoints[0].Conditions.Serving = new(false)
	require.Contains(t, ask(client), "no endpoint is usable")
}
