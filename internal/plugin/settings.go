package plugin

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/plugin/fleet"
)

// settingsReader reads the settings of the Pods of proxies.
type settingsReader struct{ files *fleet.ConfigFiles }

// services are those that an agent programs on its node.
type services int

const (
	// noServices means that there is no agent, or one that programs nothing.
	noServices services = iota
	// chosenServices means that the others are for another proxy, such as kube-proxy.
	chosenServices
	allServices
	// unknownServices means that it is not known which ones they are.
	unknownServices
)

// served returns which Services the agent of a node programs, by what it reports and by its Pod's
// settings. n is nil if no agent is known.
func (r settingsReader) served(ctx context.Context, n *node, nodes *nodesReport) (services, error) {
	if n == nil || programsNothing(n.agent.GetProgrammer()) {
		return noServices, nil
	}
	if _, warns := n.warnsOfKubeProxy(); warns {
		return allServices, nil // others do not warn
	}
	for _, p := range nodes.pods {
		if p.Node == n.Node && p.Missing == "" {
			return r.servedBy(ctx, p.Pod)
		}
	}
	return unknownServices, nil
}

// programsNothing reports whether an agent with this programmer leaves the kernel as it is.
func programsNothing(programmer string) bool {
	return programmer == "shadow" || programmer == "printer"
}

// servedBy returns which Services the agent in a Pod programs, by the Pod's command line and the
// file that this names. As in the agent, flags win over the file.
func (r settingsReader) servedBy(ctx context.Context, pod *corev1.Pod) (services, error) {
	var fromFlags, held struct {
		BesideKubeProxy              bool
		ServiceProxyName, Programmer string
	}
	fs, file, _ := fleet.CommandLine(&pod.Spec.Containers[0], func(fs *pflag.FlagSet) {
		fs.BoolVar(&fromFlags.BesideKubeProxy, "beside-kube-proxy", false, "")
		fs.StringVar(&fromFlags.ServiceProxyName, "service-proxy-name", "", "")
		fs.StringVar(&fromFlags.Programmer, "programmer", "", "")
	})
	if file != "" {
		if err := r.files.Decode(ctx, pod, pod.Spec.Containers[0].Name, file, &held); err != nil {
			return unknownServices, err
		}
	}
	beside := held.BesideKubeProxy
	if fs.Changed("beside-kube-proxy") {
		beside = fromFlags.BesideKubeProxy
	}
	switch {
	case programsNothing(cmp.Or(fromFlags.Programmer, held.Programmer)):
		return noServices, nil
	case beside || cmp.Or(fromFlags.ServiceProxyName, held.ServiceProxyName) != "":
		return chosenServices, nil
	}
	return allServices, nil
}

// modeOf returns the mode of the kube-proxy in a Pod, by the file that its command line names. Only
// without a file do flags count, as in kube-proxy. An empty mode is the default, which is not ipvs.
func (r settingsReader) modeOf(ctx context.Context, pod *corev1.Pod) (string, error) {
	var fromFlag string
	fs, file, _ := fleet.CommandLine(&pod.Spec.Containers[0], func(fs *pflag.FlagSet) { fs.StringVar(&fromFlag, "proxy-mode", "", "") })
	if file != "" {
		var held struct{ Mode string }
		err := r.files.Decode(ctx, pod, pod.Spec.Containers[0].Name, file, &held)
		return held.Mode, err
	}
	if !fs.Changed("proxy-mode") {
		return "", fmt.Errorf("the command line of the Pod %s/%s has neither --config nor --proxy-mode", pod.Namespace, pod.Name)
	}
	return fromFlag, nil
}

// containerNamed returns the container of a Pod with a name or, if there is none, the first one.
func containerNamed(pod *corev1.Pod, name string) *corev1.Container {
	at := slices.IndexFunc(pod.Spec.Containers, func(c corev1.Container) bool { return c.Name == name })
	return &pod.Spec.Containers[max(at, 0)]
}

// kubeProxyPods returns the Pods of kube-proxy that run in kube-system, by their nodes.
func kubeProxyPods(ctx context.Context, f *fleet.Fleet) (map[string]*corev1.Pod, error) {
	list, err := fleet.List(ctx, f, f.Client().CoreV1().Pods(metav1.NamespaceSystem).List, metav1.ListOptions{FieldSelector: "spec.hostNetwork=true"})
	if err != nil {
		return nil, fmt.Errorf("look for Pods of kube-proxy in %s: %w", metav1.NamespaceSystem, err)
	}
	pods := make(map[string]*corev1.Pod)
	for i := range list.Items {
		if p := &list.Items[i]; isKubeProxy(p.Labels) && p.Status.Phase == corev1.PodRunning {
			pods[p.Spec.NodeName] = p
		}
	}
	return pods, nil
}

// leadsElsewhere returns why the proxy of a node may lead to other nodes although a Service has
// internalTrafficPolicy Local and no endpoint on the node. It is empty if the proxy does not. Only
// kube-proxy's mode ipvs does. known has the nodes with agents; nil means that there are none.
// proxy is the node's kube-proxy, and err why that is unknown.
func (r settingsReader) leadsElsewhere(ctx context.Context, name string, known *nodesReport, proxy *corev1.Pod, err error) string {
	var served services
	if known != nil {
		at := slices.IndexFunc(known.nodes, func(n node) bool { return n.Node == name })
		if at >= 0 {
			// If it is not known what the agent serves, it is judged by the kube-proxy beside it.
			served, _ = r.served(ctx, &known.nodes[at], known)
		}
	}
	switch {
	case served == allServices, served == unknownServices && proxy == nil && err == nil:
		return ""
	case err != nil:
		return "the node's proxy is not known: " + err.Error()
	case proxy == nil:
		return fmt.Sprintf("the node's proxy is not known: no Pod of kube-proxy runs there in %s, and no agent that serves all Services", metav1.NamespaceSystem)
	}
	mode, err := r.modeOf(ctx, proxy)
	switch {
	case err != nil:
		return "kube-proxy's mode is not known: " + err.Error()
	case mode == "ipvs":
		return "kube-proxy's mode ipvs leads to the endpoints of other nodes then"
	}
	return ""
}
