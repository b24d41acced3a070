// These tests prove what "check --pre --pods" says of kernels: which nodes it tries, what it makes
// of each answer of a Pod, and of Pods that do not start or answer. They also prove that it leaves
// no namespace when it is interrupted, when the API server does not say whether it has created it,
// and after a command that was killed. The API server is real, and stand-ins for kubelets run the
// Pods.
package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/probe"
	"github.com/slicecast/slicecast/internal/testenv/kubelet"
)

// kernelOf returns an answer in which everything works for both families, but for what change does.
func kernelOf(release string, change func(nftables, nft, legacy, ipvs *probe.KernelProgrammer)) probe.Kernel {
	all := []probe.KernelProgrammer{{Programmer: "nftables"}, {Programmer: "iptables", Variant: "nft"}, {Programmer: "iptables", Variant: "legacy"}, {Programmer: "ipvs"}}
	for i := range all {
		all[i].Families = []string{"IPv4", "IPv6"}
	}
	if change != nil {
		change(&all[0], &all[1], &all[2], &all[3])
	}
	return probe.Kernel{Release: release, Programmers: all}
}

// fails makes programmers fail.
func fails(reason string, all ...*probe.KernelProgrammer) {
	for _, p := range all {
		p.Families, p.Error = nil, reason
	}
}

// onlyIPv4 leaves a programmer one family.
func onlyIPv4(p *probe.KernelProgrammer) {
	p.Families, p.LeftOut = []string{"IPv4"}, map[string]string{"IPv6": "no ip6tables here"}
}

func TestKernelFindings(t *testing.T) {
	const v4, v6 = model.IPv4, model.IPv6
	both := []model.Family{v4, v6}
	type programmers = *probe.KernelProgrammer
	for name, c := range map[string]struct {
		change   func(nftables, nft, legacy, ipvs programmers)
		families []model.Family
		primary  model.Family
		// want has what is found, as "result: text", and what to do.
		want []string
		do   string
	}{
		"all": {nil, both, v4, []string{"ok: nftables, iptables (nft, legacy), ipvs"}, ""},
		"no ipvs": {func(_, _, _, ipvs programmers) { fails("no IPVS (kernel module ip_vs): x", ipvs) }, both, v4, []string{
			"ok: nftables, iptables (nft, legacy); not ipvs: no IPVS (kernel module ip_vs): x",
		}, ""},
		"ipvs without a scheduler": {func(_, _, _, ipvs programmers) { fails("no scheduler", ipvs) }, both, v4, []string{"ok: nftables, iptables (nft, legacy); not ipvs: no scheduler"}, ""},
		"no nftables":              {func(nftables, _, _, _ programmers) { fails("old", nftables) }, both, v4, []string{"warning: iptables (nft, legacy), ipvs; not nftables: old"}, "which the programmer auto does"},
		"only legacy": {func(nftables, nft, _, ipvs programmers) { fails("none", nftables, nft, ipvs) }, both, v4, []string{
			"warning: iptables (legacy); not nftables: none; not iptables (nft): none; not ipvs: none",
		}, "set agent.config.iptables.variant to legacy"},
		"nothing": {func(nftables, nft, legacy, ipvs programmers) { fails("none", nftables, nft, legacy, ipvs) }, both, v4, []string{
			"failed: neither nftables nor iptables works; not nftables: none; not iptables (nft): none; not iptables (legacy): none; not ipvs: none",
		}, "install the modules that are missing"},
		"no privileges": {func(nftables, nft, legacy, ipvs programmers) {
			fails("no", nftables, nft, legacy, ipvs)
			nftables.NotPermitted = true
		}, both, v4, []string{
			"failed: neither nftables nor iptables works; not nftables: no; not iptables (nft): no; not iptables (legacy): no; not ipvs: no",
		}, "allow the capabilities NET_ADMIN and NET_RAW"},
		"no programs": {func(_, nft, legacy, _ programmers) {
			fails("not found", nft, legacy)
			nft.NoProgram, legacy.NoProgram = true, true
		}, both, v4, []string{"ok: nftables, ipvs; iptables (nft) was not tried, because the image does not have it; iptables (legacy) was not tried, because the image does not have it"}, ""},
		"no programs, and no nftables": {func(nftables, nft, legacy, _ programmers) {
			fails("not found", nftables, nft, legacy)
			nft.NoProgram, legacy.NoProgram = true, true
		}, both, v4, []string{"not checked: only ipvs works; not nftables: not found; iptables (nft) was not tried, because the image does not have it; iptables (legacy) was not tried, because the image does not have it"}, "slicecast-agent-iptables"},
		"one family, and the cluster needs no more": {func(nftables, _, _, _ programmers) { onlyIPv4(nftables) }, both[:1], v4, []string{"ok: nftables for IPv4 only, iptables (nft, legacy), ipvs"}, ""},
		"the other family is lacking": {func(nftables, _, _, _ programmers) { onlyIPv4(nftables) }, both, v4, []string{
			"ok: nftables for IPv4 only, iptables (nft, legacy), ipvs",
			"warning: the cluster has Services of IPv6, and nftables cannot program them there: no ip6tables here",
		}, "install the modules that are missing"},
		"the primary family is lacking, and it is iptables that counts": {func(nftables, nft, _, _ programmers) {
			fails("old", nftables)
			onlyIPv4(nft)
		}, both, v6, []string{
			"warning: iptables (nft for IPv4 only, legacy), ipvs; not nftables: old",
			"failed: the cluster has Services of IPv6, and iptables cannot program them there: no ip6tables here",
		}, "install the modules that are missing"},
		"a long reason": {func(_, _, _, ipvs programmers) { fails(strings.Repeat("é", maxReason), ipvs) }, both, v4, []string{
			"ok: nftables, iptables (nft, legacy); not ipvs: " + strings.Repeat("é", maxReason/2) + "…",
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			k := &nodeKind{kernel: "6.1", image: "Debian", architecture: "amd64", node: "node-1", primary: c.primary, nodes: 42}
			out := &checks{}
			k.judge(&kernelAnswer{kernel: kernelOf("6.1", c.change)}, c.families, out)
			var got []string
			for _, f := range out.list {
				require.Equal(t, "node-1 (Linux 6.1, Debian, amd64, as 41 other nodes)", f.Subject)
				got = append(got, f.Result+": "+f.Found)
				require.Equal(t, f.Result == passed, f.Do == "")
			}
			require.Equal(t, c.want, got)
			require.Contains(t, out.list[len(out.list)-1].Do, c.do)
		})
	}

	// Before Linux 5.17, the Pod cannot have ip_vs loaded.
	for release, nevertheless := range map[string]bool{"5.10.0-30-amd64": true, "5.16.9": true, "5.17.0": false, "6.18.1": false} {
		out := &checks{}
		(&nodeKind{kernel: release}).judge(&kernelAnswer{kernel: kernelOf(release, func(_, _, _, ipvs programmers) { fails("none", ipvs) })}, both, out)
		require.Equal(t, nevertheless, strings.Contains(out.list[0].Found, "ipvs may work nevertheless"), out.list[0].Found)
	}

	// An answer that is about another kernel, or none.
	for want, answer := range map[string]kernelAnswer{
		"its Pod has another kernel than the node, 4.4.0: Pods are in a sandbox there": {kernel: kernelOf("4.4.0", nil)},
		"its Pod did not try all programmers":                                          {kernel: probe.Kernel{Release: "6.1"}},
		"out of order":                                                                 {err: errors.New("out of order")},
	} {
		out := &checks{}
		(&nodeKind{kernel: "6.1"}).judge(&answer, both, out)
		require.Len(t, out.list, 1)
		require.Equal(t, notChecked, out.list[0].Result)
		require.Equal(t, want, out.list[0].Found)
	}
}

func TestKindsOfNodes(t *testing.T) {
	node := func(name, kernel, image, architecture, system string, isReady corev1.ConditionStatus, addresses ...string) corev1.Node {
		n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{
			NodeInfo:   corev1.NodeSystemInfo{KernelVersion: kernel, OSImage: image, Architecture: architecture, OperatingSystem: system},
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: isReady}},
		}}
		for _, a := range addresses {
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
		}
		return n
	}
	const yes, no = corev1.ConditionTrue, corev1.ConditionFalse
	kinds := kindsOf([]corev1.Node{
		node("d", "6.1", "Debian", "arm64", "linux", no), node("c", "6.1", "Debian", "amd64", "linux", yes, "fd00::1", "10.0.0.1"),
		node("b", "6.1", "Debian", "amd64", "linux", no, "10.0.0.2"), node("a", "6.8", "Ubuntu", "amd64", "linux", yes, "10.0.0.3"),
		node("w", "10.0", "Windows", "amd64", "windows", yes), node("m", "6.1", "Debian", "s390x", "linux", yes),
		node("e", "6.1", "Debian", "amd64", "linux", yes), node("f", "6.1", "Other", "amd64", "linux", yes),
	})
	require.Equal(t, []*nodeKind{
		{"6.1", "Debian", "amd64", "c", true, model.IPv6, 3}, {"6.8", "Ubuntu", "amd64", "a", true, model.IPv4, 1},
		{"6.1", "Debian", "arm64", "d", false, 0, 1}, {"6.1", "Other", "amd64", "f", true, 0, 1},
	}, kinds)
	require.Equal(t, "c (Linux 6.1, Debian, amd64, as 2 other nodes)", kinds[0].String())
	require.Equal(t, "a (Linux 6.8, Ubuntu, amd64)", kinds[1].String())

	long := kindsOf([]corev1.Node{node("a", strings.Repeat("6", 1<<20), strings.Repeat("é", 1<<20), "amd64", "linux", yes)})
	require.Equal(t, "a (Linux "+strings.Repeat("6", maxNodeText)+"…, "+strings.Repeat("é", maxNodeText/2)+"…, amd64)", long[0].String())
}

// podRunner does with the Pods of checks what the kubelets of their nodes would.
type podRunner struct {
	front *front

	mu sync.Mutex // guards nodes and seen
	// nodes has what to do with a Pod, by the name of its node.
	nodes map[string]func(*corev1.Pod)
	seen  []*corev1.Pod
	// works has the notes of checks.
	works []string
}

func newPodRunner(t *testing.T) *podRunner {
	t.Helper()
	r := &podRunner{front: newFront(t), nodes: make(map[string]func(*corev1.Pod))}
	watch, err := plane.Client().CoreV1().Pods("").Watch(context.Background(), metav1.ListOptions{LabelSelector: runLabel})
	require.NoError(t, err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for e := range watch.ResultChan() {
			p, ok := e.Object.(*corev1.Pod)
			if !ok || e.Type != "ADDED" {
				continue
			}
			r.mu.Lock()
			run := r.nodes[p.Spec.NodeName]
			r.seen = append(r.seen, p.DeepCopy())
			r.mu.Unlock()
			if run != nil {
				run(p)
			}
		}
	}()
	t.Cleanup(func() {
		watch.Stop()
		<-ended
	})
	return r
}

// pods returns the Pods that were created.
func (r *podRunner) pods() []*corev1.Pod {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.seen
}

// node registers a ready node with a kernel of its own, which does this with its Pods.
func (r *podRunner) node(name string, run func(*corev1.Pod)) {
	r.front.Helper()
	(&environment{T: r.front.T}).nodeWith(name, corev1.NodeSystemInfo{OperatingSystem: "linux", Architecture: "amd64", OSImage: "Test", KernelVersion: "6.1-" + name})
	r.mu.Lock()
	defer r.mu.Unlock()
	r.nodes[name] = run
}

// answering registers a ready node whose Pods answer the probe, and a node of the same kind.
func (r *podRunner) answering(name string, answer func() (string, error)) {
	t := r.front.T
	t.Helper()
	k := kubelet.Start(t, plane, name)
	nodes := plane.Client().CoreV1().Nodes()
	n, err := nodes.Get(t.Context(), name, metav1.GetOptions{})
	require.NoError(t, err)
	n.Status.NodeInfo.KernelVersion, n.Status.NodeInfo.OSImage = "6.1-"+name, "Test"
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	n, err = nodes.UpdateStatus(t.Context(), n, metav1.UpdateOptions{})
	require.NoError(t, err)
	(&environment{T: t}).nodeWith(name+"-2", n.Status.NodeInfo)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.nodes[name] = func(p *corev1.Pod) {
		k.Exec(p.Namespace, p.Name, func(command []string) (string, error) {
			if strings.Join(command, " ") != "slicecast-agent probe kernel" {
				return "", fmt.Errorf("no such command: %q", command)
			}
			return answer()
		})
		r.status(p, func(s *corev1.PodStatus) {
			s.Phase, s.Conditions = corev1.PodRunning, []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
			s.PodIPs = []corev1.PodIP{{IP: "10.1.2.3"}}
		})
	}
}

// status changes the status of a Pod.
func (r *podRunner) status(p *corev1.Pod, change func(*corev1.PodStatus)) {
	change(&p.Status)
	_, err := plane.Client().CoreV1().Pods(p.Namespace).UpdateStatus(context.Background(), p, metav1.UpdateOptions{})
	if err != nil && !apierrors.IsNotFound(err) { // the command may have removed it
		r.front.Error(err)
	}
}

// waits returns what makes a Pod wait for a reason.
func (r *podRunner) waits(reason, message string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		r.status(p, func(s *corev1.PodStatus) {
			s.Phase = corev1.PodPending
			s.ContainerStatuses = []corev1.ContainerStatus{{Name: "probe", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}}}}
		})
	}
}

// check checks the modules only, and returns the findings and what was said.
func (r *podRunner) check(ctx context.Context, limit time.Duration) (findings map[string]finding, said string) {
	r.front.Helper()
	var text bytes.Buffer
	m := &modules{progress: progress{to: &text}, image: "image", timeLimit: limit}
	out := &checks{}
	out.begin("modules", "page")
	m.check(ctx, readCluster(ctx, r.front.reach(patience)), out)
	findings = make(map[string]finding)
	for _, f := range out.list {
		if f.Result == note {
			r.works = append(r.works, f.Found)
			continue
		}
		subject, _, _ := strings.Cut(f.Subject, " ")
		require.NotContains(r.front, findings, subject)
		findings[subject] = f
	}
	return findings, text.String()
}

// requireNoRuns requires that no namespace and no Pod of a run is left.
func requireNoRuns(t *testing.T) {
	t.Helper()
	namespaces, err := plane.Client().CoreV1().Namespaces().List(t.Context(), metav1.ListOptions{LabelSelector: runLabel})
	require.NoError(t, err)
	require.Empty(t, namespaces.Items)
	pods, err := plane.Client().CoreV1().Pods("").List(t.Context(), metav1.ListOptions{LabelSelector: runLabel})
	require.NoError(t, err)
	require.Empty(t, pods.Items)
}

// kernelAnswerOf returns what the probe on a node prints.
func kernelAnswerOf(t *testing.T, node string, change func(nftables, nft, legacy, ipvs *probe.KernelProgrammer)) func() (string, error) {
	t.Helper()
	text, err := json.Marshal(kernelOf("6.1-"+node, change))
	require.NoError(t, err)
	return func() (string, error) { return string(text), nil }
}

// TestCheckKernels runs the whole command.
func TestCheckKernels(t *testing.T) {
	r := newPodRunner(t)
	r.answering("fine", kernelAnswerOf(t, "fine", func(_, _, _, ipvs *probe.KernelProgrammer) { fails("no \x1b[31mIPVS", ipvs) }))
	r.answering("poor", kernelAnswerOf(t, "poor", func(nftables, nft, legacy, ipvs *probe.KernelProgrammer) {
		fails("no nf_tables", nftables, nft, legacy, ipvs)
	}))
	kubeconfig := plane.Kubeconfig(t, &rest.Config{Host: r.front.address})
	done := runAs(t.Context(), kubeconfig, "check", "--pre", "--pods", "-o", "wide", "--image=registry.example.com/agent:v1")
	require.Regexp(t, `(?m)^modules +fine \(Linux 6.1-fine, Test, amd64, as 1 other node\) +nftables, iptables \(nft, legacy\); not ipvs: no  \[31mIPVS$`, done.out)
	require.Contains(t, done.out, "FAILED: modules: poor (Linux 6.1-poor, Test, amd64, as 1 other node): neither nftables nor iptables works; not nftables: no nf_tables; ")
	require.Contains(t, done.out, "docs/kubectl.md#kernel-modules")
	require.NotContains(t, done.out, "the kernels' modules were not looked at")
	require.Regexp(t, "^Trying the kernels of 4 nodes in 2 Pods in the namespace slicecast-check-", done.errors)
	require.Contains(t, done.out, "NOTE: modules: what works on 2 nodes: nftables, iptables (nft, legacy)\n")
	requireNoRuns(t)

	pods := r.pods()
	require.Len(t, pods, 2)
	for _, p := range pods {
		c := p.Spec.Containers[0]
		require.Equal(t, "registry.example.com/agent:v1", c.Image)
		require.Equal(t, []corev1.Capability{"NET_ADMIN", "NET_RAW"}, c.SecurityContext.Capabilities.Add)
		require.Equal(t, []corev1.Capability{"ALL"}, c.SecurityContext.Capabilities.Drop)
		require.True(t, *c.SecurityContext.ReadOnlyRootFilesystem && !*c.SecurityContext.AllowPrivilegeEscalation && c.SecurityContext.Privileged == nil)
		require.False(t, p.Spec.HostNetwork || p.Spec.HostPID || p.Spec.HostIPC || *p.Spec.AutomountServiceAccountToken)
		require.Len(t, p.Spec.Volumes, 1)
		require.NotNil(t, p.Spec.Volumes[0].EmptyDir)
		require.Equal(t, int64((2*time.Minute+kernelAnswerTime+cleanupTime+time.Minute)/time.Second), *p.Spec.ActiveDeadlineSeconds)
	}

	// Without --pods, it says what was left out, and how to have it.
	done = runAs(t.Context(), kubeconfig, "check", "--pre")
	require.Contains(t, done.out, "NOTE: modules: the kernels' modules were not looked at")
	require.Contains(t, done.out, "kubectl slicecast check --pre --pods")
	require.Len(t, r.pods(), 2)
}

// TestPodsThatSayNothing checks that each Pod that does not start or answer as it should leaves its
// own kind unchecked, with the reason, and no other.
func TestPodsThatSayNothing(t *testing.T) {
	r := newPodRunner(t)
	r.answering("fine", kernelAnswerOf(t, "fine", nil))
	r.answering("old", func() (string, error) { return "", errors.New(`unknown command "kernel" for "slicecast-agent probe"`) })
	r.answering("hostile", func() (string, error) { return strings.Repeat("x", 2*maxKernelAnswer), nil })
	r.answering("strange", func() (string, error) { return `["` + strings.Repeat("y", 1000) + `"]`, nil })
	r.node("pull", r.waits("ImagePullBackOff", "Back-off pulling image: not found"))
	r.node("stuck", r.waits("ContainerCreating", "waits for its network"))
	r.node("dead", nil)
	r.node("ended", func(p *corev1.Pod) {
		r.status(p, func(s *corev1.PodStatus) {
			s.Phase, s.Reason, s.Message = corev1.PodFailed, "OutOfpods", "too many"+strings.Repeat("!", 10*maxReason)
		})
	})
	r.node("chatty", func(p *corev1.Pod) {
		for i := range 3 * maxWaits {
			r.waits("ErrImagePull", fmt.Sprint(i/2))(p) // each comes twice
			var err error
			p, err = plane.Client().CoreV1().Pods(p.Namespace).Get(context.Background(), p.Name, metav1.GetOptions{})
			require.NoError(t, err)
		}
	})
	r.node("quiet", r.waits("ContainerCreating", ""))
	r.node("denied", nil)
	r.node("invalid", nil)
	r.front.pods = func(w http.ResponseWriter, request *http.Request) {
		body, err := io.ReadAll(request.Body)
		require.NoError(t, err)
		if bytes.Contains(body, []byte("denied")) {
			http.Error(w, "the policy forbids NET_ADMIN", http.StatusForbidden)
			return
		}
		if bytes.Contains(body, []byte("invalid")) {
			http.Error(w, "the policy wants a label", http.StatusUnprocessableEntity)
			return
		}
		request.Body = io.NopCloser(bytes.NewReader(body))
		r.front.proxy.ServeHTTP(w, request)
	}
	findings, said := r.check(t.Context(), 3*time.Second)
	require.Len(t, findings, 12)
	require.Equal(t, []string{"what works on 2 nodes: nftables, iptables (nft, legacy), ipvs"}, r.works)
	require.Equal(t, passed, findings["fine"].Result, findings["fine"].Found)
	for node, want := range map[string]string{
		"old":     `ask its Pod: unknown command "kernel"`,
		"hostile": `its Pod has printed "xxx`,
		"strange": `its Pod has printed "[\"yyy`,
		"pull":    "its Pod cannot start: ImagePullBackOff Back-off pulling image: not found",
		"stuck":   "wait for its Pod: that took more than 3s (--time-limit): ContainerCreating waits for its network",
		"dead":    "wait for its Pod: that took more than 3s (--time-limit): ",
		"ended":   "its Pod has ended: OutOfpods too many",
		"denied":  "create a Pod: the policy forbids NET_ADMIN",
		"invalid": "create a Pod: ",
		"chatty":  "wait for its Pod: that took more than 3s (--time-limit): ErrImagePull 7",
		"quiet":   "wait for its Pod: that took more than 3s (--time-limit): ContainerCreating",
	} {
		require.Equal(t, notChecked, findings[node].Result, node)
		require.Contains(t, findings[node].Found, want, node)
		require.Less(t, len(findings[node].Found), 2*maxReason, node)
		do := "with slicecast-agent from the release's archive: unshare --net slicecast-agent probe kernel"
		switch node {
		case "denied", "invalid":
			do = "let the policy that is named allow it, or get the rights that docs/kubectl.md lists"
		case "pull", "chatty":
			do = "name an image of an agent that the nodes can pull (--image)"
		}
		require.Contains(t, findings[node].Do, do, "%s: %s", node, findings[node].Found)
	}
	require.Equal(t, maxWaits, strings.Count(said, "chatty: "), said)
	require.Equal(t, 1, strings.Count(said, "ErrImagePull 1\n"), said)
	require.NotContains(t, said, "quiet: ")
	require.Contains(t, said, "stuck: its Pod is not ready yet: ContainerCreating waits for its network")
	requireNoRuns(t)
}

// TestForbiddenExec checks what a user who may not run commands in Pods is told to do.
func TestForbiddenExec(t *testing.T) {
	r := newPodRunner(t)
	r.answering("fine", kernelAnswerOf(t, "fine", nil))
	r.front.noExec = true
	findings, _ := r.check(t.Context(), patience)
	require.Len(t, findings, 1)
	require.Contains(t, findings["fine"].Found, "you may not")
	require.Equal(t, byRights, findings["fine"].Do)
	requireNoRuns(t)
}

// TestManyKinds checks that the number of Pods is bounded, and that what is left out is named.
func TestManyKinds(t *testing.T) {
	r := newPodRunner(t)
	for i := range maxKinds + 2 {
		r.node(fmt.Sprintf("kind-%02d", i), r.waits("InvalidImageName", "none"))
	}
	(&environment{T: t}).nodeWith("zz", corev1.NodeSystemInfo{OperatingSystem: "linux", Architecture: "amd64", OSImage: "Test", KernelVersion: "6.1-kind-21"})
	findings, _ := r.check(t.Context(), patience)
	require.Len(t, findings, maxKinds+2)
	require.Len(t, r.pods(), maxKinds)
	for name, f := range findings {
		require.Equal(t, notChecked, f.Result)
		leftOut := name == "kind-19" || name == "kind-20" // kind-21 has two nodes
		require.Equal(t, leftOut, strings.Contains(f.Found, "only the 20 most frequent kinds of nodes are tried"), "%s: %s", name, f.Found)
	}
	requireNoRuns(t)
}

// TestInterruptedCheck checks that Ctrl-C removes the namespace.
func TestInterruptedCheck(t *testing.T) {
	r := newPodRunner(t)
	ctx, interrupt := context.WithCancel(t.Context())
	r.node("busy", func(*corev1.Pod) { interrupt() })
	done := runAs(ctx, plane.Kubeconfig(t, &rest.Config{Host: r.front.address}), "check", "--pre", "--pods", "--image=image")
	require.Equal(t, incomplete, done.code, done.out)
	require.Contains(t, done.errors, "Interrupted: removing the namespace slicecast-check-")
	require.Contains(t, done.errors, "Removed the namespace slicecast-check-")
	require.Len(t, r.pods(), 1)
	requireNoRuns(t)
}

// TestInterruptedRemoval checks that an interrupted check names a namespace that the API server
// cannot remove, with the reason, once.
func TestInterruptedRemoval(t *testing.T) {
	r := newPodRunner(t)
	namespaces := plane.Client().CoreV1().Namespaces()
	ctx, interrupt := context.WithCancel(t.Context())
	r.node("busy", func(*corev1.Pod) { interrupt() })
	r.front.refuses.Store(true)
	done := runAs(ctx, plane.Kubeconfig(t, &rest.Config{Host: r.front.address}), "check", "--pre", "--pods", "--image=image")
	require.Equal(t, incomplete, done.code, done.out)
	list, err := namespaces.List(t.Context(), metav1.ListOptions{LabelSelector: runLabel})
	require.NoError(t, err)
	require.Len(t, list.Items, 1)
	name := list.Items[0].Name
	require.Regexp(t, "(?m)^remove the namespace "+name+": a finalizer stays \\(.*\\); run "+cleanupCommand+"$", done.errors)
	require.Equal(t, 1, strings.Count(done.errors, "a finalizer stays"))
	r.front.refuses.Store(false)
	_, err = removeLeft(t.Context(), r.front.reach(patience), &progress{to: io.Discard}, true)
	require.NoError(t, err)
	requireNoRuns(t)
}

// TestCheckWithoutAnswer checks that the namespace is removed although the API server says that its
// creation has failed, and that a refused one is reported with the right that is missing.
func TestCheckWithoutAnswer(t *testing.T) {
	r := newPodRunner(t)
	r.node("fine", nil)
	r.front.creates = func(w http.ResponseWriter, request *http.Request) {
		r.front.proxy.ServeHTTP(httptest.NewRecorder(), request)
		http.Error(w, "etcdserver: request timed out", http.StatusInternalServerError)
	}
	findings, said := r.check(t.Context(), patience)
	require.Len(t, findings, 1)
	require.Equal(t, notChecked, findings[""].Result)
	require.Contains(t, findings[""].Found, "if it exists later, run kubectl slicecast connectivity --cleanup")
	require.Contains(t, said, "may be created yet")
	require.Equal(t, int64(1), r.front.deletes.Load())
	requireNoRuns(t)

	r.front.creates = func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "you may not", http.StatusForbidden) }
	findings, _ = r.check(t.Context(), patience)
	require.Contains(t, findings[""].Found, "you may not")
	require.Equal(t, byPolicy, findings[""].Do)

	// So are those of a policy, and Pods that may not be listed or watched.
	r.front.creates = func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "the policy wants a label", http.StatusUnprocessableEntity)
	}
	findings, _ = r.check(t.Context(), patience)
	require.Equal(t, byPolicy, findings[""].Do, findings[""].Found)
	r.front.creates = nil
	for verb, watches := range map[string]bool{"list": false, "watch": true} {
		r.front.follows = func(watch bool) bool { return watch != watches }
		findings, _ = r.check(t.Context(), patience)
		require.Contains(t, findings[""].Found, verb+" Pods: ")
		require.Equal(t, byRights, findings[""].Do)
		requireNoRuns(t)
	}
	require.Empty(t, r.pods())
}

// TestKilledCheck checks that the next check removes what a killed one has left, and that
// connectivity --cleanup does.
func TestKilledCheck(t *testing.T) {
	r := newPodRunner(t)
	r.node("fine", r.waits("InvalidImageName", "none"))
	left := func() string {
		n := newTemporaryNamespace(r.front.reach(patience), &progress{}, checkPrefix)
		require.NoError(t, n.createNamespace(t.Context(), "privileged", -time.Second))
		return n.namespace
	}
	name := left()
	_, said := r.check(t.Context(), patience)
	require.Contains(t, said, "Removed what an earlier run had left: namespace "+name)
	requireNoRuns(t)

	name = left()
	done := runAs(t.Context(), plane.Kubeconfig(t, &rest.Config{Host: r.front.address}), "connectivity", "--cleanup")
	require.Equal(t, fine, done.code, done.errors)
	require.Contains(t, done.out, "Removed what an earlier run had left: namespace "+name)
	requireNoRuns(t)
}

func TestCheckFlags(t *testing.T) {
	for want, args := range map[string][]string{
		"has no image of it: name an image of an agent that the nodes can pull (--image)": {"--pre", "--pods"},
		"--pods is for --pre":                   {"--pods"},
		"leave out --watch":                     {"--pre", "--pods", "--watch"},
		"--image and --time-limit are for --po": {"--pre", "--image=x"},
		"--time-limit is 1s":                    {"--pre", "--pods", "--time-limit=1s"},
		"--time-limit is 1h0m0s":                {"--pre", "--pods", "--time-limit=1h"},
	} {
		c := NewCommand()
		c.SetArgs(append([]string{"check", "--kubeconfig=/nowhere"}, args...))
		require.ErrorContains(t, c.Execute(), want)
	}

	// Shells do not complete these to the names of files.
	for _, flag := range []string{"--image", "--time-limit"} {
		var out bytes.Buffer
		c := NewCommand()
		c.SetArgs([]string{"__complete", "check", flag, ""})
		c.SetOut(&out)
		require.NoError(t, c.Execute())
		require.Equal(t, ":4\n", out.String(), "the directive is NoFileComp")
	}
}
