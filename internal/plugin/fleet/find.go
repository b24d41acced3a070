package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/slicecast/slicecast/internal/model"
)

// The labels by which Pods are found, which the chart sets.
const (
	partOfSlicecast = "app.kubernetes.io/part-of=slicecast"
	componentLabel  = "app.kubernetes.io/component"
	componentServer = "server"
	componentRelay  = "relay"
	componentAgent  = "agent"
)

// DefaultNamespace is the servers' namespace in the chart.
const DefaultNamespace = "slicecast-system"

// defaultAgents is the agents' namespace in the chart. Agents are looked for there if no server
// says where its agents are.
const defaultAgents = "slicecast-agents"

// serverNameAnnotation on a server's Pod is the name in the server's certificate, if the Pod has no
// --server-service.
const serverNameAnnotation = "slicecast.io/server-name"

// caConfigMap is the name of the ConfigMap with the CAs of a namespace's servers, if these have no
// --ca-config-map.
const caConfigMap = "slicecast-ca"

// Server is the Pod of a server or relay.
type Server struct {
	types.NamespacedName

	UID types.UID
	// Node is the name of the Pod's node.
	Node string
	// Addresses are the Pod's IP addresses.
	Addresses []string
	// Relay means that the server is configured to be fed by other servers.
	Relay bool
	// AgentNamespaces are those of the ServiceAccounts of its agents.
	AgentNamespaces []string
	// ServiceAccount is the name of the Pod's ServiceAccount.
	ServiceAccount string
	// Pod is the Pod itself, and Container the name of the server's container.
	Pod       *corev1.Pod
	Container string

	// missing is why the server cannot be asked; nil if there is no known reason.
	missing error
	// port is that of gRPC, and pagesPort that of metrics and the page, or 0. serverName is the name
	// in the server's certificate, ca the ConfigMap with its CAs, and audience that of its tokens.
	port, pagesPort      int
	serverName, audience string
	ca                   types.NamespacedName
	plaintext            bool
	// proxyName is --service-proxy-name. It is nil if the command line cannot be parsed, or if it
	// leaves the name to the configuration file, whose path is config.
	proxyName *string
	config    string
}

// Agent is the Pod of an agent.
type Agent struct {
	types.NamespacedName

	// Node is the name of the node that the agent programs.
	Node string
	// Missing is why the Pod does not run, such as its phase; empty if it runs.
	Missing string
	// Pod is the Pod itself, and Container the name of the agent's container.
	Pod       *corev1.Pod
	Container string
}

// Servers returns the servers and relays of the Fleet's namespace, sorted by name. Whoever may
// create Pods there decides what is a server, and with its flags, which CAs it is verified with and
// where its agents are.
func (f *Fleet) Servers(ctx context.Context) ([]*Server, error) {
	selector := fmt.Sprintf("%s,%s in (%s,%s)", partOfSlicecast, componentLabel, componentServer, componentRelay)
	pods, err := f.pods(ctx, selector, []string{f.options.Namespace})
	if err != nil {
		if apierrors.IsForbidden(err) {
			err = fmt.Errorf("%w; if the servers are in another namespace, set --namespace", err)
		}
		return nil, fmt.Errorf("find the servers: %w", withRights(err))
	}
	pods = slices.DeleteFunc(pods, func(p corev1.Pod) bool { // those that have ended
		return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
	})
	var servers []*Server
	for i := range pods {
		servers = append(servers, newServer(&pods[i]))
	}
	if len(servers) == 0 {
		where := "any namespace; check --context"
		if f.options.Namespace != "" {
			where = "the namespace " + f.options.Namespace + "; check --context, and set --namespace to the servers' namespace"
		}
		return nil, fmt.Errorf("%w: there is no Pod with the labels %s in %s", ErrNoServers, selector, where)
	}
	return servers, nil
}

// Agents returns the Pods of the agents that have a node, sorted by name, also those that do not
// run. They are in the namespaces that the servers accept agents from.
func (f *Fleet) Agents(ctx context.Context, servers []*Server) ([]*Agent, error) {
	var namespaces []string
	for _, s := range servers {
		namespaces = append(namespaces, s.AgentNamespaces...)
	}
	slices.Sort(namespaces)
	if namespaces = slices.Compact(namespaces); len(namespaces) == 0 {
		namespaces = []string{defaultAgents}
	}
	pods, err := f.pods(ctx, fmt.Sprintf("%s,%s=%s", partOfSlicecast, componentLabel, componentAgent), namespaces)
	if err != nil {
		return nil, fmt.Errorf("find the agents: %w", withRights(err))
	}
	var agents []*Agent
	for i := range pods {
		pod := &pods[i]
		if pod.Spec.NodeName == "" {
			continue
		}
		agents = append(agents, &Agent{
			NamespacedName: types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}, Node: pod.Spec.NodeName,
			Missing: missing(pod), Pod: pod, Container: pod.Spec.Containers[0].Name,
		})
	}
	return agents, nil
}

// AgentOn returns the agent of a node: the first one that runs or, with an error that says why it
// does not run, the first one. It returns nil and an error if there is none.
func AgentOn(agents []*Agent, node string) (*Agent, error) {
	var found *Agent
	for _, a := range agents {
		switch {
		case a.Node != node:
		case a.Missing == "":
			return a, nil
		case found == nil:
			found = a
		}
	}
	if found == nil {
		return nil, errors.New("no Pod of an agent is on the node, or you may not list it")
	}
	return found, errors.New("the agent's Pod does not run: " + found.Missing)
}

// withRights returns an error that says where the necessary rights are, if one of them is missing.
func withRights(err error) error {
	if apierrors.IsForbidden(err) {
		return fmt.Errorf("%w; docs/kubectl.md says which rights are needed", err)
	}
	return err
}

// missing returns why a Pod does not run: that it is being deleted, or its phase and the reason for
// that, such as "Pending, ImagePullBackOff". It is empty if the Pod runs.
func missing(pod *corev1.Pod) string {
	if pod.DeletionTimestamp != nil {
		return "Terminating"
	}
	if pod.Status.Phase == corev1.PodRunning {
		return ""
	}
	why := cmp.Or(string(pod.Status.Phase), "Pending")
	reason := pod.Status.Reason
	for _, c := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		if w := c.State.Waiting; w != nil {
			reason = cmp.Or(reason, w.Reason)
		}
	}
	if reason != "" {
		why += ", " + reason
	}
	return why
}

// pods lists the Pods with these labels in some namespaces, sorted by name. The empty namespace
// stands for all.
func (f *Fleet) pods(ctx context.Context, selector string, namespaces []string) (pods []corev1.Pod, err error) {
	for _, namespace := range namespaces {
		list, err := List(ctx, f, f.client.CoreV1().Pods(namespace).List, metav1.ListOptions{LabelSelector: selector})
		if err != nil {
			return nil, err
		}
		pods = append(pods, list.Items...)
	}
	slices.SortFunc(pods, func(a, b corev1.Pod) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return pods, nil
}

// CommandLine parses the flags that add defines, and --config, from a container's command line.
// Other flags are ignored. The error is about a value that the program itself would refuse.
func CommandLine(c *corev1.Container, add func(*pflag.FlagSet)) (fs *pflag.FlagSet, config string, err error) {
	fs = pflag.NewFlagSet("", pflag.ContinueOnError)
	fs.ParseErrorsAllowlist.UnknownFlags = true
	fs.Usage = func() {}
	fs.StringVar(&config, "config", "", "")
	add(fs)
	err = fs.Parse(slices.Concat(c.Command, c.Args))
	return fs, config, err
}

// container returns the container with a port named grpc or, if there is none, the first one.
func container(pod *corev1.Pod) *corev1.Container {
	for i := range pod.Spec.Containers {
		c := &pod.Spec.Containers[i]
		if slices.ContainsFunc(c.Ports, func(p corev1.ContainerPort) bool { return p.Name == "grpc" }) {
			return c
		}
	}
	return &pod.Spec.Containers[0]
}

// newServer returns the server in a Pod. The Pod's command line says how to reach it.
func newServer(pod *corev1.Pod) *Server {
	s := &Server{
		NamespacedName: types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}, UID: pod.UID, Node: pod.Spec.NodeName,
		ServiceAccount: pod.Spec.ServiceAccountName, Pod: pod,
	}
	for _, ip := range pod.Status.PodIPs {
		s.Addresses = append(s.Addresses, ip.IP)
	}
	c := container(pod)
	s.Container = c.Name
	var source, service, address, pages, audience, proxyName string
	var caConfigMaps, agents []string
	fs, config, err := CommandLine(c, func(fs *pflag.FlagSet) {
		fs.StringVar(&source, "source", "kube", "")
		fs.StringVar(&service, "server-service", "", "")
		fs.StringVar(&address, "bind-address", ":8472", "")
		fs.StringVar(&pages, "metrics-bind-address", "", "")
		fs.StringVar(&audience, "token-audience", "", "")
		fs.StringArrayVar(&caConfigMaps, "ca-config-map", nil, "")
		fs.StringArrayVar(&agents, "agent-service-account", nil, "")
		fs.BoolVar(&s.plaintext, "insecure-plaintext", false, "")
		fs.StringVar(&proxyName, "service-proxy-name", "", "")
	})
	if err != nil {
		s.missing = fmt.Errorf("the Pod's command line: %w", err)
		return s
	}
	s.Relay, s.config = source == "upstream", config
	if fs.Changed("service-proxy-name") || config == "" {
		s.proxyName = &proxyName
	}
	for _, account := range agents {
		namespace, _, _ := strings.Cut(account, "/")
		s.AgentNamespaces = append(s.AgentNamespaces, namespace)
	}
	s.audience = cmp.Or(audience, "slicecast")
	if s.Relay {
		s.audience = cmp.Or(audience, "slicecast-relay")
	}
	s.serverName = pod.Annotations[serverNameAnnotation]
	if key, ok := model.ParseServiceKey(service); ok {
		s.serverName = cmp.Or(s.serverName, key.Name+"."+key.Namespace+".svc")
	}
	s.ca = types.NamespacedName{Namespace: pod.Namespace, Name: caConfigMap}
	for i, name := range caConfigMaps {
		key, ok := model.ParseServiceKey(name) // ConfigMaps are named in the same way
		if ok && (i == 0 || key.Namespace == pod.Namespace) {
			s.ca = types.NamespacedName(key)
		}
	}
	if _, port, err := net.SplitHostPort(pages); err == nil {
		s.pagesPort, _ = strconv.Atoi(port) // 0, as without the flag, if it is a name
	}
	s.missing = s.reachable(pod, address)
	return s
}

// reachable sets the port, and returns why the server cannot be reached, or nil.
func (s *Server) reachable(pod *corev1.Pod, address string) error {
	_, port, err := net.SplitHostPort(address)
	if err == nil {
		s.port, err = strconv.Atoi(port)
	}
	switch {
	case err != nil:
		return fmt.Errorf("the Pod's --bind-address: %w", err)
	case pod.DeletionTimestamp != nil:
		return errTerminating
	case pod.Status.Phase != corev1.PodRunning:
		return fmt.Errorf("the Pod is %s", cmp.Or(string(pod.Status.Phase), "Pending"))
	case !s.plaintext && s.serverName == "":
		return fmt.Errorf("the name in its certificate is unknown: start it with --server-service, or set the Pod's annotation %s",
			serverNameAnnotation)
	}
	return nil
}
