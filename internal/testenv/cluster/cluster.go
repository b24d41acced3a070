package cluster

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
	"github.com/slicecast/slicecast/internal/testenv/repository"
)

//go:embed manifests
var manifests embed.FS

// Proxy is what programs Services on the nodes.
type Proxy string

// The proxies.
const (
	// NoProxy leaves the nodes without Services, for a proxy that is installed later.
	NoProxy Proxy = "none"
	// KubeProxy is kube-proxy as a DaemonSet, as kubeadm installs it.
	KubeProxy Proxy = "kube-proxy"
	// Slicecast is installed from the manifests of deploy/kubernetes.
	Slicecast Proxy = "slicecast"
)

// Options configure a cluster.
type Options struct {
	// Nodes is the number of nodes, which are named node-1, node-2 and so on and are in the zones a,
	// b and c in turn. 0 means one.
	Nodes int
	// Proxy programs the Services. Empty means NoProxy.
	Proxy Proxy
	// Programmer is how the proxy programs the kernel: nftables, which empty means, or iptables.
	Programmer string
	// Logf receives a line for each step of the start. It may be nil.
	Logf func(format string, args ...any)
}

// complete returns the options with their defaults.
func (o Options) complete() (Options, error) {
	o.Nodes = max(o.Nodes, 1)
	o.Proxy, o.Programmer = cmp.Or(o.Proxy, NoProxy), cmp.Or(o.Programmer, "nftables")
	if o.Logf == nil {
		o.Logf = func(string, ...any) {}
	}
	if !slices.Contains([]Proxy{NoProxy, KubeProxy, Slicecast}, o.Proxy) {
		return o, fmt.Errorf("unknown proxy %q: choose %s, %s or %s", o.Proxy, Slicecast, KubeProxy, NoProxy)
	}
	if o.Programmer != "nftables" && o.Programmer != "iptables" {
		return o, fmt.Errorf("unknown programmer %q: choose nftables or iptables", o.Programmer)
	}
	return o, nil
}

// Cluster is a running cluster.
type Cluster struct {
	ControlPlane *controlplane.ControlPlane
	// Network is the network of the nodes. Its clients are outside of the cluster, and its World is
	// the network namespace of this process and of the control plane.
	Network *testenv.Network
	Nodes   []*Node
	// Client has all rights.
	Client kubernetes.Interface
	// Dir is a folder that is visible outside of the namespaces and has the logs of the nodes. It is
	// removed after the end of the process.
	Dir string
	// Kubeconfig is the path of the administrator's kubeconfig for programs that this process starts.
	Kubeconfig string
	// OutsideKubeconfig is the path of the one for programs of the machine. It is empty if the
	// process was not isolated by [Isolate].
	OutsideKubeconfig string

	// KubectlPath is the path of kubectl.
	KubectlPath string

	options Options
	state   string // the folder of the nodes' disks and other files, on a tmpfs of the process
	images  string // the file of the images that the cluster itself needs
	owner   *owner
	outside net.Listener
	serving sync.WaitGroup // the connections from outside
}

const (
	// stateDir is on a tmpfs that only this process and its children see.
	stateDir = "/run/slicecast-cluster"
	// patience bounds the time of each wait of a start, on a machine that does other things, too.
	patience = 5 * time.Minute

	coreDNSImage   = "registry.k8s.io/coredns/coredns:v1.15.0"
	kubeProxyImage = "registry.k8s.io/kube-proxy:v1.37.2"
	pauseImage     = "registry.k8s.io/pause:3.10.2"
	// AgnhostImage is the image of Kubernetes' own tests: a client and a server for many purposes,
	// with a shell and curl, dig, nc, ip and ss.
	AgnhostImage = "registry.k8s.io/e2e-test-images/agnhost:2.66.1"
)

// dnsAddresses are the cluster IPs of DNS.
var dnsAddresses = []string{"10.96.0.10", "fd00:10:96::a"}

// running is whether this process has a cluster.
var running atomic.Bool

// Start starts a cluster and returns once its nodes, DNS and proxy are ready. Stop stops it.
func Start(ctx context.Context, options Options) (_ *Cluster, err error) {
	if options, err = options.complete(); err != nil {
		return nil, err
	}
	dir := os.Getenv(dirVariable)
	if dir == "" {
		return nil, errors.New("the process is not isolated: call cluster.Main from TestMain, or cluster.Isolate first thing in main")
	}
	if !running.CompareAndSwap(false, true) {
		return nil, errors.New("this process has a cluster already: stop that first")
	}
	c := &Cluster{options: options, Dir: dir, state: stateDir, owner: &owner{}}
	defer func() {
		if failed := recover(); failed != nil {
			failure, ok := failed.(failure)
			if !ok {
				panic(failed)
			}
			err = failure.error
		}
		if err != nil {
			err = fmt.Errorf("cluster: %w", errors.Join(err, c.Stop()))
		}
	}()
	return c, c.start(ctx)
}

func (c *Cluster) start(ctx context.Context) error {
	if err := os.MkdirAll(c.state, 0o755); err != nil {
		return err
	}
	c.images, c.Kubeconfig = filepath.Join(c.state, "images.tar"), filepath.Join(c.state, "kubeconfig")
	c.Network = testenv.NewNetwork(c.owner)
	c.Network.RouteWorld()
	for i := range c.options.Nodes {
		name := fmt.Sprintf("node-%d", i+1)
		node := c.Network.AddNode(name)
		c.Nodes = append(c.Nodes, &Node{Node: node, Zone: string(rune('a' + i%3)), cluster: c, disk: filepath.Join(c.state, name)})
	}
	var parts errgroup.Group
	parts.Go(func() error {
		defer c.step("images")()
		return c.writeImages(ctx)
	})
	parts.Go(func() error {
		defer c.step("control plane")()
		return c.startControlPlane(ctx)
	})
	if err := parts.Wait(); err != nil {
		return err
	}
	for _, node := range c.Nodes {
		parts.Go(func() error {
			defer c.step(node.Name)()
			return errors.Join(node.register(ctx), node.Start(ctx))
		})
	}
	if err := errors.Join(parts.Wait(), os.Remove(c.images)); err != nil {
		return err
	}
	if err := c.install(ctx); err != nil {
		return err
	}
	defer c.step("nodes, DNS and proxy ready")()
	return c.awaitReady(ctx)
}

// step logs the time of a step when the function that it returns is called.
func (c *Cluster) step(name string) func() {
	began := time.Now()
	return func() { c.options.Logf("%s: %s", name, time.Since(began).Round(100*time.Millisecond)) }
}

func (c *Cluster) startControlPlane(ctx context.Context) (err error) {
	if c.KubectlPath, err = controlplane.KubernetesBinary(ctx, "kubectl"); err != nil {
		return err
	}
	c.ControlPlane, err = controlplane.Run(ctx, controlplane.Options{Address: c.Network.World.IPv4, Nodes: true, Dir: c.state})
	if err != nil {
		return err
	}
	c.Client = c.ControlPlane.Client()
	if err := c.ControlPlane.WriteKubeconfig(c.Kubeconfig, c.ControlPlane.AdminConfig()); err != nil {
		return err
	}
	return c.serveOutside()
}

// writeImages writes the images that the cluster itself needs, and agnhost.
func (c *Cluster) writeImages(ctx context.Context) error {
	coredns, err := CoreDNSBinary(ctx)
	if err != nil {
		return err
	}
	agnhost, err := controlplane.KubernetesBinary(ctx, "agnhost")
	if err != nil {
		return err
	}
	kubeProxy, err := controlplane.KubernetesBinary(ctx, "kube-proxy")
	if err != nil {
		return err
	}
	own := filepath.Join(c.Dir, binariesDir)
	return WriteImages(ctx, c.images, append(SlicecastImages(own, OwnTag),
		Image{Name: pauseImage, Binary: filepath.Join(own, "pause"), Entrypoint: "/pause"},
		Image{Name: coreDNSImage, Binary: coredns, Entrypoint: "/coredns"},
		Image{Name: AgnhostImage, Binary: agnhost, Entrypoint: "/agnhost", Args: []string{"pause"}, Commands: shell},
		Image{Name: kubeProxyImage, Binary: kubeProxy, Entrypoint: "/usr/local/bin/kube-proxy", Commands: proxying},
	)...)
}

// install applies the manifests of DNS and the proxy.
func (c *Cluster) install(ctx context.Context) error {
	if err := c.apply(ctx, "coredns.yaml", coreDNSImage); err != nil {
		return err
	}
	switch c.options.Proxy {
	case KubeProxy:
		return c.InstallKubeProxy(ctx)
	case Slicecast:
		root, err := repository.Root()
		if err != nil {
			return err
		}
		return c.applySlicecast(ctx, filepath.Join(root, "deploy", "kubernetes"), nil)
	default:
		return nil
	}
}

// InstallKubeProxy applies the manifests of kube-proxy: a DaemonSet with its ConfigMap in
// kube-system, like that of kubeadm.
func (c *Cluster) InstallKubeProxy(ctx context.Context) error {
	return c.apply(ctx, "kube-proxy.yaml", kubeProxyImage)
}

func (c *Cluster) apply(ctx context.Context, name, image string) error {
	manifest, err := render(name, map[string]any{
		"APIHost": c.Network.World.IPv4, "APIPort": c.ControlPlane.Port(), "DNS": dnsAddresses,
		"PodCIDRs": PodCIDRs, "Programmer": c.options.Programmer, "Image": image,
	})
	if err != nil {
		return err
	}
	_, err = c.Kubectl(ctx, manifest, "apply", "--server-side", "-f", "-")
	return err
}

// PodCIDRs are the address ranges of all pods.
const PodCIDRs = "10.180.0.0/16,fd00:10:180::/48"

// Kubectl runs kubectl as administrator, with text on its standard input, and returns what it
// prints.
func (c *Cluster) Kubectl(ctx context.Context, stdin string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, c.KubectlPath, append([]string{"--kubeconfig=" + c.Kubeconfig}, args...)...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("kubectl %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return string(out), err
}

// awaitReady waits for the nodes, and for everything in Deployments and DaemonSets.
func (c *Cluster) awaitReady(ctx context.Context) error {
	if err := c.AwaitNodes(ctx); err != nil {
		return err
	}
	if err := c.AwaitRollout(ctx, "kube-system", "deployment/coredns"); err != nil {
		return err
	}
	switch c.options.Proxy {
	case KubeProxy:
		return c.AwaitRollout(ctx, "kube-system", "daemonset/kube-proxy")
	case Slicecast:
		return c.AwaitSlicecast(ctx)
	default:
		return nil
	}
}

// AwaitNodes waits until all nodes are ready.
func (c *Cluster) AwaitNodes(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return testenv.WaitFor(limited, func() error {
		list, err := c.Client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		ready := map[string]bool{}
		for _, node := range list.Items {
			for _, condition := range node.Status.Conditions {
				ready[node.Name] = ready[node.Name] || condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue
			}
		}
		for _, node := range c.Nodes {
			if !ready[node.Name] {
				return fmt.Errorf("%s is not ready; see its logs in %s\n%s", node.Name, node.logs(), node.logTails())
			}
		}
		return nil
	})
}

// AwaitRollout waits until all pods of a Deployment or DaemonSet, such as daemonset/kube-proxy, are
// ready.
func (c *Cluster) AwaitRollout(ctx context.Context, namespace, name string) error {
	_, err := c.Kubectl(ctx, "", "--namespace="+namespace, "rollout", "status", name, fmt.Sprintf("--timeout=%s", patience))
	if err != nil {
		pods, podsErr := c.Kubectl(context.WithoutCancel(ctx), "", "--namespace="+namespace, "describe", "pods")
		return errors.Join(err, podsErr, errors.New(pods))
	}
	return nil
}

// Import loads the images of a file into all nodes.
func (c *Cluster) Import(ctx context.Context, path string) error {
	var nodes errgroup.Group
	for _, node := range c.Nodes {
		nodes.Go(func() error { return node.Import(ctx, path) })
	}
	return nodes.Wait()
}

// Node returns the node with a name, such as node-1, or nil.
func (c *Cluster) Node(name string) *Node {
	for _, node := range c.Nodes {
		if node.Name == name {
			return node
		}
	}
	return nil
}

// Stop stops the cluster and removes everything.
func (c *Cluster) Stop() (err error) {
	defer running.Store(false)
	defer func() {
		if failure, ok := recover().(failure); ok {
			err = errors.Join(err, failure.error)
		}
	}()
	var errs []error
	if c.outside != nil {
		errs = append(errs, c.outside.Close())
	}
	for _, node := range c.Nodes {
		errs = append(errs, node.Stop())
	}
	if c.ControlPlane != nil {
		errs = append(errs, c.ControlPlane.Close())
	}
	c.serving.Wait()
	err = errors.Join(append(errs, os.RemoveAll(c.state))...)
	c.owner.close()
	return err
}

// owner is the testenv.TB of the cluster's network. A failure is a panic, which Start and Stop turn
// into an error.
type owner struct{ cleanups []func() }

type failure struct{ error }

// Helper implements testenv.TB.
func (*owner) Helper() {}

// Fatalf implements testenv.TB.
func (*owner) Fatalf(format string, args ...any) { panic(failure{fmt.Errorf(format, args...)}) }

// Cleanup implements testenv.TB.
func (o *owner) Cleanup(f func()) { o.cleanups = append(o.cleanups, f) }

func (o *owner) close() {
	for len(o.cleanups) > 0 {
		last := o.cleanups[len(o.cleanups)-1]
		o.cleanups = o.cleanups[:len(o.cleanups)-1]
		last()
	}
}
