package plugin

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/probe"
	"github.com/slicecast/slicecast/internal/show"
	"github.com/slicecast/slicecast/internal/source"
)

const (
	// maxKinds bounds the Pods of a run, which are one for each kind of nodes.
	maxKinds = 20
	// maxKernelAnswer bounds what a Pod may answer, and maxReason what is shown of a reason in it, in
	// bytes.
	maxKernelAnswer, maxReason = 64 << 10, 600
	// maxNodeText bounds what is shown of each name that a node reports, in bytes.
	maxNodeText = 100
	// maxWaits is how many reasons of a Pod that is not ready yet are printed.
	maxWaits = 5
	// kernelAnswerTime bounds the time of an answer. A command of iptables waits for its lock for 10
	// seconds, and modules are loaded meanwhile.
	kernelAnswerTime = time.Minute
	// iptablesImage is the repository of the image that has all that the probe tries.
	iptablesImage = "ghcr.io/slicecast/slicecast-agent-iptables"
)

const (
	// byHand is what to do if a Pod could not say anything.
	byHand = "mend that and check again, or run as root on such a node, with slicecast-agent from the release's archive: " +
		"unshare --net slicecast-agent probe kernel"
	// byRights is what to do if an operation is forbidden, and byPolicy if the creation of an object
	// is refused. Admission policies and RBAC may answer the same.
	byRights = "get the rights that docs/kubectl.md lists, and check again"
	byPolicy = "let the policy that is named allow it, or get the rights that docs/kubectl.md lists, and check again"
	// byImage is what to do if a node has no image for the Pod.
	byImage = "name an image of an agent that the nodes can pull (--image)"
)

// loadsIPVS is the first version of Linux that loads the module ip_vs for a process with NET_ADMIN:
// since then the module has an alias for IPVS's family of generic netlink.
var loadsIPVS = version.MustParseGeneric("5.17")

// publishedImage returns the image of this version in a repository.
func publishedImage(repository string) (string, error) {
	v := daemon.Version()
	if v == "devel" {
		return "", fmt.Errorf("this build has no version, so %s has no image of it: %s", repository, byImage)
	}
	return repository + ":" + v, nil
}

// notAllowed reports whether the API server, or a policy, refuses to create an object.
func notAllowed(err error) bool {
	return apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsBadRequest(err)
}

// modules tries in Pods what the kernels of nodes can do. These are its flags.
type modules struct {
	progress
	// image is that of the Pods.
	image     string
	timeLimit time.Duration
}

// lifetime is how long Pods may run.
func (m *modules) lifetime() time.Duration {
	return m.timeLimit + kernelAnswerTime + cleanupTime + time.Minute
}

// nodeKind is a kernel of some nodes, with what its modules come from. The kernels of other nodes
// of the kind have the same modules.
type nodeKind struct {
	kernel, image, architecture string
	// node is the first of the ready nodes, or of all if none is ready. primary is its primary IP
	// family, or 0 if that is not known.
	node    string
	ready   bool
	primary model.Family
	// nodes is the number of nodes.
	nodes int
}

// kindsOf returns the kinds of Linux nodes for whose architecture there are images, the most
// frequent first.
func kindsOf(nodes []corev1.Node) []*nodeKind {
	type key struct{ kernel, image, architecture string }
	kinds := make(map[key]*nodeKind)
	var all []*nodeKind
	nodes = slices.Clone(nodes)
	slices.SortFunc(nodes, func(a, b corev1.Node) int { return cmp.Compare(a.Name, b.Name) })
	for i := range nodes {
		n := &nodes[i]
		info := n.Status.NodeInfo
		if info.OperatingSystem != "linux" || !hasImages(info.Architecture) {
			continue // checkNodes has said so
		}
		at := key{info.KernelVersion, info.OSImage, info.Architecture}
		k := kinds[at]
		if k == nil {
			k = &nodeKind{kernel: beginning(at.kernel, maxNodeText), image: beginning(at.image, maxNodeText), architecture: at.architecture}
			kinds[at] = k
			all = append(all, k)
		}
		k.nodes++
		if r := ready(n); k.node == "" || r && !k.ready {
			k.node, k.ready, k.primary = n.Name, r, primaryFamily(n)
		}
	}
	slices.SortStableFunc(all, func(a, b *nodeKind) int { return cmp.Compare(b.nodes, a.nodes) })
	return all
}

// primaryFamily returns the family of a node's first InternalIP, or 0.
func primaryFamily(n *corev1.Node) model.Family {
	for _, a := range n.Status.Addresses {
		if ip, err := netip.ParseAddr(a.Address); err == nil && a.Type == corev1.NodeInternalIP {
			return model.FamilyOf(ip)
		}
	}
	return 0
}

// String names the kind by its node.
func (k *nodeKind) String() string {
	text := fmt.Sprintf("%s (Linux %s, %s, %s", k.node, k.kernel, cmp.Or(k.image, "unknown image"), k.architecture)
	if k.nodes > 1 {
		text += ", as " + show.Plural("other node", k.nodes-1)
	}
	return text + ")"
}

// kernelAnswer is what came of trying a kind of nodes.
type kernelAnswer struct {
	kernel probe.Kernel
	// addresses are those of the Pod.
	addresses []corev1.PodIP
	// err is why nothing was tried, and do is what to do then. Empty means byHand.
	err error
	do  string
}

// check tries one node of each kind.
func (m *modules) check(ctx context.Context, c *cluster, out *checks) {
	if c.nodesErr != nil {
		out.unknown("", c.nodesErr)
		return
	}
	all := kindsOf(c.nodes)
	if len(all) == 0 {
		out.bad(notChecked, "", "there is no Linux node that could be tried", "check again when there is one")
	}
	var kinds []*nodeKind
	for _, k := range all {
		switch {
		case !k.ready:
			out.bad(notChecked, k.String(), "no node of this kind is ready", "check again when one is")
		case len(kinds) == maxKinds:
			out.bad(notChecked, k.String(), fmt.Sprintf("only the %d most frequent kinds of nodes are tried", maxKinds), byHand)
		default:
			kinds = append(kinds, k)
		}
	}
	if len(kinds) == 0 {
		return
	}
	left, err := removeLeft(ctx, c.fleet, &m.progress, false)
	if err != nil {
		out.unknown("", err)
		return
	}
	for _, name := range left {
		m.say("Removed what an earlier run had left: namespace %s", name)
	}
	namespace := newTemporaryNamespace(c.fleet, &m.progress, checkPrefix)
	limited, cancel := context.WithTimeoutCause(ctx, m.timeLimit, fmt.Errorf("that took more than %v (--time-limit)", m.timeLimit))
	defer cancel()
	nodes := 0
	for _, k := range kinds {
		nodes += k.nodes
	}
	m.say("Trying the kernels of %s in %s in the namespace %s", show.Plural("node", nodes), show.Plural("Pod", len(kinds)), namespace.namespace)
	// What nftables and iptables need is above the level baseline.
	err = namespace.createNamespace(limited, "privileged", m.lifetime())
	refusal := notAllowed(err)
	if err == nil {
		err = mayFollowPods(limited, namespace)
	}
	var answers []kernelAnswer
	if err == nil {
		answers = m.try(ctx, limited, namespace, kinds)
	}
	if left, ok := errors.AsType[*removalError](namespace.end(ctx)); ok {
		out.bad(notChecked, "", left.found(), left.next)
	}
	switch {
	case refusal:
		out.bad(notChecked, "", shortened(err.Error()), byPolicy)
		return
	case err != nil:
		out.unknown("", err)
		return
	}
	families := c.serviceFamilies(ctx, answers)
	fine := make(map[string]int) // numbers of nodes, by what works
	for i, k := range kinds {
		before := len(out.list)
		k.judge(&answers[i], families, out)
		if f := out.list[before]; f.Result == passed {
			works, _, _ := strings.Cut(f.Found, "; ")
			fine[works] += k.nodes
		}
	}
	// The findings that are ok are only shown with -o wide.
	for _, works := range slices.Sorted(maps.Keys(fine)) {
		out.bad(note, "", fmt.Sprintf("what works on %s: %s", show.Plural("node", fine[works]), works), "-o wide names each kind of nodes")
	}
}

// mayFollowPods returns an error if the user may not list or watch the Pods of the namespace. Who
// waits for Pods would not be told.
func mayFollowPods(ctx context.Context, n *temporaryNamespace) error {
	pods := n.fleet.Client().CoreV1().Pods(n.namespace)
	if _, err := fleet.Within(ctx, n.fleet, func(ctx context.Context) (*corev1.PodList, error) {
		return pods.List(ctx, metav1.ListOptions{})
	}); err != nil {
		return fmt.Errorf("list Pods: %w", err)
	}
	w, err := fleet.Within(ctx, n.fleet, func(ctx context.Context) (watch.Interface, error) {
		return pods.Watch(ctx, metav1.ListOptions{})
	})
	if err != nil {
		return fmt.Errorf("watch Pods: %w", err)
	}
	w.Stop()
	return nil
}

// try creates the Pods and asks each as soon as it is ready. It waits for Pods until limited ends.
func (m *modules) try(ctx, limited context.Context, namespace *temporaryNamespace, kinds []*nodeKind) []kernelAnswer {
	answers := make([]kernelAnswer, len(kinds))
	var creating errgroup.Group
	creating.SetLimit(8)
	for i, k := range kinds {
		creating.Go(func() error {
			_, err := namespace.fleet.Client().CoreV1().Pods(namespace.namespace).Create(limited, m.newPod(namespace, i, k), metav1.CreateOptions{})
			if err != nil {
				answers[i].err = fmt.Errorf("create a Pod: %w", err)
				if notAllowed(err) {
					answers[i].do = byPolicy
				}
			}
			return nil
		})
	}
	_ = creating.Wait() // its errors are in the answers
	pending := make(map[string]int)
	waits := make([]string, len(kinds)) // what each Pod waits for
	said := make([]map[string]bool, len(kinds))
	for i := range kinds {
		if answers[i].err == nil {
			pending[podName("kernel", i)], said[i] = i, make(map[string]bool)
		}
	}
	var asking sync.WaitGroup
	var err error
	if len(pending) > 0 {
		err = awaitObjects(limited, podsOf(namespace.fleet, namespace.namespace), func(pods map[string]*corev1.Pod) bool {
			for name, i := range pending {
				p := pods[name]
				if p == nil {
					continue
				}
				why, ended := hopeless(p), false
				switch {
				case why != "":
					answers[i].err, answers[i].do, ended = errors.New(why), doAbout(p), true
				case podReady(p):
					answers[i].addresses, answers[i].do, ended = p.Status.PodIPs, "", true
					asking.Go(func() {
						answers[i].kernel, answers[i].err = askKernel(ctx, namespace, name)
						if answers[i].err != nil && mayNotExec(ctx, namespace) {
							answers[i].do = byRights
						}
					})
				default:
					answers[i].do = doAbout(p)
					waits[i] = shortened(waiting(p))
					if usual := waits[i] == "Pending" || waits[i] == "ContainerCreating"; !usual && !said[i][waits[i]] && len(said[i]) < maxWaits {
						said[i][waits[i]] = true
						m.say("%s: its Pod is not ready yet: %s", kinds[i].node, waits[i])
					}
				}
				if ended {
					delete(pending, name)
				}
			}
			return len(pending) == 0
		})
	}
	asking.Wait()
	for _, i := range pending {
		answers[i].err = fmt.Errorf("wait for its Pod: %w: %s", err, cmp.Or(waits[i], "its kubelet has not seen it"))
	}
	return answers
}

// mayNotExec reports whether the user has no right to run commands in the Pods. The error of a
// refused command is only a text.
func mayNotExec(ctx context.Context, n *temporaryNamespace) bool {
	review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
		ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: n.namespace, Verb: "create", Resource: "pods", Subresource: "exec"},
	}}
	answer, err := fleet.Within(ctx, n.fleet, func(ctx context.Context) (*authorizationv1.SelfSubjectAccessReview, error) {
		return n.fleet.Client().AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
	})
	return err == nil && !answer.Status.Allowed
}

// newPod returns the Pod for a kind. It has the capabilities of an agent's container and no more,
// and a network of its own, in which iptables may leave tables.
func (m *modules) newPod(namespace *temporaryNamespace, index int, k *nodeKind) *corev1.Pod {
	p := namespace.newPod(podName("kernel", index), k.node, m.image, m.lifetime(), "slicecast-agent", "probe", "wait")
	c := &p.Spec.Containers[0]
	c.SecurityContext.RunAsUser, c.SecurityContext.Capabilities.Add = new(int64(0)), []corev1.Capability{"NET_ADMIN", "NET_RAW"}
	// For the lock of legacy iptables, in /run.
	c.VolumeMounts = []corev1.VolumeMount{{Name: "run", MountPath: "/run"}}
	p.Spec.Volumes = []corev1.Volume{{Name: "run", VolumeSource: corev1.VolumeSource{
		EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory, SizeLimit: new(apiresource.MustParse("1Mi"))},
	}}}
	return p
}

// hopeless returns why a Pod will not be ready any more, or an empty string.
func hopeless(p *corev1.Pod) string {
	var texts []string
	ended := p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded
	if ended {
		texts = append(texts, p.Status.Reason, p.Status.Message)
	}
	for _, c := range p.Status.ContainerStatuses {
		if t := c.State.Terminated; t != nil && ended {
			texts = append(texts, t.Reason, t.Message)
		}
		// ImagePullBackOff comes after the first attempt, which has the reason ErrImagePull.
		if w := c.State.Waiting; w != nil && slices.Contains([]string{"ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}, w.Reason) {
			return "its Pod cannot start: " + waiting(p)
		}
	}
	if !ended {
		return ""
	}
	texts = slices.DeleteFunc(texts, func(s string) bool { return s == "" })
	return strings.TrimSuffix("its Pod has ended: "+strings.Join(texts, " "), ": ")
}

// doAbout returns what to do about a Pod that does not start, or an empty string.
func doAbout(p *corev1.Pod) string {
	for _, c := range p.Status.ContainerStatuses {
		if w := c.State.Waiting; w != nil && slices.Contains([]string{"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}, w.Reason) {
			return byImage
		}
	}
	return ""
}

// shortened returns the beginning of a text of a node.
func shortened(text string) string { return beginning(text, maxReason) }

// beginning returns a text, or its first bytes if it has more, in valid UTF-8.
func beginning(text string, bytes int) string {
	if len(text) <= bytes {
		return text
	}
	return strings.ToValidUTF8(text[:bytes], "") + "…"
}

// askKernel runs the probe in a Pod.
func askKernel(ctx context.Context, namespace *temporaryNamespace, pod string) (k probe.Kernel, err error) {
	limited, cancel := context.WithTimeoutCause(ctx, kernelAnswerTime, fmt.Errorf("no answer within %v", kernelAnswerTime))
	defer cancel()
	name := types.NamespacedName{Namespace: namespace.namespace, Name: pod}
	answer, err := namespace.fleet.Run(limited, name, maxKernelAnswer, nil, "slicecast-agent", "probe", "kernel")
	if err != nil {
		return k, fmt.Errorf("ask its Pod: %w", err)
	}
	if err := json.Unmarshal(answer, &k); err != nil {
		return k, fmt.Errorf("its Pod has printed %.100q: use an image of this version (--image)", answer)
	}
	return k, nil
}

// serviceFamilies returns the IP families of Services, or those of the Pods if the API server does
// not say, as before Kubernetes 1.33.
func (c *cluster) serviceFamilies(ctx context.Context, answers []kernelAnswer) (families []model.Family) {
	add := func(a netip.Addr) {
		if f := model.FamilyOf(a); !slices.Contains(families, f) {
			families = append(families, f)
		}
	}
	ranges, err := fleet.Within(ctx, c.fleet, func(ctx context.Context) (*networkingv1.ServiceCIDRList, error) {
		return c.client.NetworkingV1().ServiceCIDRs().List(ctx, metav1.ListOptions{})
	})
	if err == nil {
		for _, r := range ranges.Items {
			for _, text := range r.Spec.CIDRs {
				if p, ok := source.ParsePrefix(text); ok {
					add(p.Addr())
				}
			}
		}
	}
	if len(families) > 0 {
		return families
	}
	for _, answer := range answers {
		for _, ip := range answer.addresses {
			if a, err := netip.ParseAddr(ip.IP); err == nil {
				add(a)
			}
		}
	}
	return families
}

// judge adds what the answer means for the nodes of the kind, in a cluster with these IP families.
func (k *nodeKind) judge(a *kernelAnswer, families []model.Family, out *checks) {
	if a.err != nil {
		out.bad(notChecked, k.String(), shortened(a.err.Error()), cmp.Or(a.do, byHand))
		return
	}
	if a.kernel.Release != k.kernel {
		out.bad(notChecked, k.String(), fmt.Sprintf("its Pod has another kernel than the node, %.100s: Pods are in a sandbox there", a.kernel.Release), byHand)
		return
	}
	of := make(map[[2]string]*probe.KernelProgrammer)
	for i := range a.kernel.Programmers {
		p := &a.kernel.Programmers[i]
		of[[2]string{p.Programmer, p.Variant}] = p
	}
	nftables, nft, legacy, ipvs := of[[2]string{"nftables"}], of[[2]string{"iptables", "nft"}], of[[2]string{"iptables", "legacy"}], of[[2]string{"ipvs"}]
	if nftables == nil || nft == nil || legacy == nil || ipvs == nil {
		out.bad(notChecked, k.String(), "its Pod did not try all programmers", "use an image of this version (--image)")
		return
	}
	const modules = "install the modules that are missing there, which some systems have in packages of their own, or load them when the node " +
		"boots if it does not allow that later"
	works := working(nftables, nft, legacy, ipvs)
	if v, err := version.ParseGeneric(k.kernel); err == nil && v.LessThan(loadsIPVS) && !programsAny(ipvs) && !ipvs.NotPermitted {
		works += "; before Linux 5.17, only a privileged process such as the chart's init container has ip_vs loaded, so ipvs may work nevertheless"
	}
	used := nftables
	switch {
	case programsAny(nftables):
		out.ok(k.String(), "%s", works)
	case programsAny(nft):
		used = nft
		out.bad(warning, k.String(), works, "nothing, if agents may use iptables there, which the programmer auto does; otherwise "+modules)
	case programsAny(legacy):
		used = legacy
		out.bad(warning, k.String(), works, "set agent.config.iptables.variant to legacy, which the programmer auto uses there then; or "+modules)
	case nft.NoProgram && legacy.NoProgram:
		out.bad(notChecked, k.String(), works, "use an image with iptables (--image), such as "+iptablesImage)
		return
	case nftables.NotPermitted:
		out.bad(failed, k.String(), works, "allow the capabilities NET_ADMIN and NET_RAW, which agents have, too: a policy of the cluster, or SELinux, "+
			"AppArmor or a user namespace on the node takes them away")
		return
	default:
		out.bad(failed, k.String(), works, modules)
		return
	}
	for _, f := range families {
		if slices.Contains(used.Families, f.String()) {
			continue
		}
		result := warning
		if f == k.primary {
			result = failed // as agents report it
		}
		out.bad(result, k.String(), fmt.Sprintf("the cluster has Services of %v, and %s cannot program them there: %s", f, used.Programmer,
			shortened(cmp.Or(used.LeftOut[f.String()], "no reason is known"))), modules)
	}
}

// programsAny reports whether a programmer can program an IP family.
func programsAny(p *probe.KernelProgrammer) bool { return len(p.Families) > 0 }

// working returns a text that names what works, and why the rest does not.
func working(nftables, nft, legacy, ipvs *probe.KernelProgrammer) string {
	var works, variants, lacks []string
	// try adds a programmer to those that work, under a name, or to what is lacking.
	try := func(p *probe.KernelProgrammer, works *[]string, name, whole string) {
		switch {
		case len(p.Families) == 1:
			*works = append(*works, fmt.Sprintf("%s for %.10s only", name, p.Families[0]))
		case programsAny(p):
			*works = append(*works, name)
		case p.NoProgram:
			lacks = append(lacks, whole+" was not tried, because the image does not have it")
		default:
			lacks = append(lacks, "not "+whole+": "+shortened(p.Error))
		}
	}
	try(nftables, &works, "nftables", "nftables")
	try(nft, &variants, "nft", "iptables (nft)")
	try(legacy, &variants, "legacy", "iptables (legacy)")
	if len(variants) > 0 {
		works = append(works, fmt.Sprintf("iptables (%s)", strings.Join(variants, ", ")))
	}
	main := len(works) > 0
	try(ipvs, &works, "ipvs", "ipvs")
	switch {
	case len(works) == 0:
		works = append(works, "neither nftables nor iptables works")
	case !main:
		works[0] = "only " + works[0] + " works"
	}
	return strings.Join(append([]string{strings.Join(works, ", ")}, lacks...), "; ")
}
