// Package controlplane runs a real Kubernetes control plane for tests: etcd, kube-apiserver and, on
// request, kube-controller-manager with the controllers that create EndpointSlices. There is no
// kubelet, so tests create Pods and write their status themselves. The control plane is real
// because Slicecast depends most on what fake API servers get wrong: resource versions, watch
// bookmarks and expiry, streaming lists, protobuf, RBAC and bound tokens.
//
// etcd always has the version that Kubernetes is built with. With an etcd before 3.4.31 or 3.5.13,
// kube-apiserver does not stream lists.
//
// Each component can be stopped, killed, paused and started again on the same port and data. No
// component outlives the test process, however that process ends.
package controlplane

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// The settings that all control planes share.
const (
	// ServiceCIDRs are the ranges of cluster IPs. IPv4 is the primary family.
	ServiceCIDRs = "10.96.0.0/16,fd00:10:96::/112"
	// Issuer is the issuer of ServiceAccount tokens and their default audience.
	Issuer = "https://kubernetes.default.svc.cluster.local"
)

// Options configure a control plane. The zero value is an API server on loopback without
// controllers.
type Options struct {
	// Address is the address that the API server listens on, advertises and has in its certificate;
	// the zero value means 127.0.0.1. It must exist in the network namespace of the test process.
	Address netip.Addr
	// Controllers starts a kube-controller-manager with the controllers for Endpoints,
	// EndpointSlices and their mirroring, for namespaces and for garbage collection, which removes
	// the slices of a deleted Service.
	Controllers bool
	// Nodes makes it the control plane of nodes with kubelets: with all controllers, a scheduler,
	// ServiceAccounts, and the address of the API server as the endpoint of the Service kubernetes.
	Nodes bool
	// Policies makes the API server obey ValidatingAdmissionPolicies.
	Policies bool
	// Dir is the directory in which the control plane makes its own. Empty means that of temporary
	// files.
	Dir string
	// ControllerFlags are additional command-line flags of kube-controller-manager, such as
	// --max-endpoints-per-slice=5.
	ControllerFlags []string
	// APIServerFlags are additional command-line flags of kube-apiserver.
	APIServerFlags []string
	// OldAddresses makes the API server admit the addresses and ranges that it admitted before
	// Kubernetes 1.36 and that clusters may still contain: with leading zeros, IPv4-mapped, and
	// ranges with host bits.
	OldAddresses bool
}

// ControlPlane is a running control plane.
type ControlPlane struct {
	Etcd      *Process
	APIServer *Process
	// ControllerManager is nil unless Options.Controllers or Options.Nodes is set.
	ControllerManager *Process
	// Scheduler is nil unless Options.Nodes is set.
	Scheduler *Process

	dir      string
	lock     *os.File
	logf     func(format string, args ...any)
	spawner  *spawner
	pki      *pki
	etcdURL  string
	endpoint netip.AddrPort
	client   kubernetes.Interface
	borrowed *borrowed // nil unless the control plane is lent
}

// Start runs a control plane until the end of the test t. If t fails, it logs the ends of the
// components' logs.
func Start(t testing.TB, options Options) *ControlPlane {
	t.Helper()
	cp, err := start(t.Context(), options, t.Logf)
	require.NoError(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			cp.logTails()
		}
		if err := cp.Close(); err != nil {
			t.Error(err)
		}
	})
	return cp
}

// Around returns a test main that starts a control plane, stores it in *cp, runs the tests of m and
// stops the control plane. All tests of a package then share it:
//
//	func TestMain(m *testing.M) {
//		goleak.VerifyTestMain(controlplane.Around(m, controlplane.Options{}, &cp))
//	}
func Around(m *testing.M, options Options, cp **ControlPlane) interface{ Run() int } {
	return around{m, options, cp}
}

type around struct {
	m       *testing.M
	options Options
	cp      **ControlPlane
}

// Run runs the tests with the control plane, and returns their exit code.
func (a around) Run() int {
	flag.Parse()
	if f := flag.Lookup("test.fuzzworker"); f != nil && f.Value.String() == "true" {
		return a.m.Run() // a fuzz worker runs no tests and needs no control plane
	}
	logf := func(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }
	cp, err := start(context.Background(), a.options, logf)
	if err != nil {
		logf("%v", err)
		return 1
	}
	*a.cp = cp
	code := a.m.Run()
	if code != 0 {
		cp.logTails()
	}
	if err := cp.Close(); err != nil {
		logf("%v", err)
		return 1
	}
	return code
}

// Run starts a control plane for a program that is not a test. The caller must close it.
func Run(ctx context.Context, options Options) (*ControlPlane, error) {
	return start(ctx, options, func(string, ...any) {})
}

func start(ctx context.Context, options Options, logf func(string, ...any)) (_ *ControlPlane, err error) {
	began := time.Now()
	if !options.Address.IsValid() {
		options.Address = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	cp := &ControlPlane{logf: logf, spawner: newSpawner()}
	defer func() {
		if err != nil {
			err = fmt.Errorf("control plane: %w", errors.Join(err, cp.Close()))
		}
	}()
	if lent := os.Getenv(LentVariable); lent != "" {
		return cp, cp.borrow(lent, options)
	}
	if cp.dir, cp.lock, err = makeDir(options.Dir); err != nil {
		return nil, err
	}
	if cp.pki, err = newPKI(cp.dir, options.Address); err != nil {
		return nil, err
	}
	if err := cp.startEtcd(ctx); err != nil {
		return nil, err
	}
	if err := cp.startAPIServer(ctx, options); err != nil {
		return nil, err
	}
	if cp.client, err = kubernetes.NewForConfig(cp.AdminConfig()); err != nil {
		return nil, err
	}
	if options.Controllers || options.Nodes {
		if err := cp.startControllerManager(ctx, options); err != nil {
			return nil, err
		}
	}
	if options.Nodes {
		if err := cp.startScheduler(ctx); err != nil {
			return nil, err
		}
	}
	logf("control plane ready at %s after %s", cp.URL(), time.Since(began).Round(time.Millisecond))
	return cp, nil
}

// Close stops a control plane that Run has started, and removes its files. It kills all processes,
// as a graceful end would have no benefit.
func (cp *ControlPlane) Close() error {
	var errs []error
	for _, p := range cp.processes() {
		if err := p.Kill(); err != nil && !errors.Is(err, errNotRunning) {
			errs = append(errs, err)
		}
	}
	cp.spawner.close()
	if cp.borrowed != nil {
		errs = append(errs, cp.borrowed.giveBack())
	}
	if cp.dir != "" {
		errs = append(errs, os.RemoveAll(cp.dir), cp.lock.Close())
	}
	return errors.Join(errs...)
}

// processes returns the components so that each comes before those that it depends on.
func (cp *ControlPlane) processes() []*Process {
	var all []*Process
	for _, p := range []*Process{cp.Scheduler, cp.ControllerManager, cp.APIServer, cp.Etcd} {
		if p != nil {
			all = append(all, p)
		}
	}
	return all
}

func (cp *ControlPlane) logTails() {
	for _, p := range cp.processes() {
		cp.logf("---- end of the log of %s:\n%s", p.Name(), p.LogTail())
	}
}

// URL returns the URL of the API server.
func (cp *ControlPlane) URL() string { return "https://" + cp.endpoint.String() }

// AdminConfig returns a configuration for a client with all rights and without a rate limit.
func (cp *ControlPlane) AdminConfig() *rest.Config {
	return cp.ConfigFor("admin", "system:masters")
}

// Client returns a client with all rights and without a rate limit.
func (cp *ControlPlane) Client() kubernetes.Interface { return cp.client }

// ConfigFor returns a configuration for a client that authenticates with a certificate as a user in
// groups. The client has the rights that RBAC grants them, and no rate limit.
func (cp *ControlPlane) ConfigFor(user string, groups ...string) *rest.Config {
	cert, key := cp.pki.client(user, groups)
	return &rest.Config{
		Host: cp.URL(), QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{CAData: cp.pki.ca.PEM(), ServerName: serverName, CertData: cert, KeyData: key},
	}
}

// Kubeconfig writes config to a kubeconfig file that exists until the end of t, and returns its
// path.
func (cp *ControlPlane) Kubeconfig(t testing.TB, config *rest.Config) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, cp.WriteKubeconfig(path, config))
	return path
}

// Namespace creates a namespace with a name derived from the test's. At the end of t it deletes the
// namespace with everything in it. The deletion continues in the background and needs
// Options.Controllers.
func (cp *ControlPlane) Namespace(t testing.TB) string {
	t.Helper()
	namespace, err := cp.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{GenerateName: namePrefix(t.Name())},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	t.Cleanup(func() {
		// Without a kubelet nothing else ends pods that were scheduled.
		now := metav1.DeleteOptions{GracePeriodSeconds: new(int64)}
		err := errors.Join(
			cp.client.CoreV1().Pods(namespace.Name).DeleteCollection(context.Background(), now, metav1.ListOptions{}),
			cp.client.CoreV1().Namespaces().Delete(context.Background(), namespace.Name, metav1.DeleteOptions{}),
		)
		if err != nil {
			t.Errorf("delete namespace %s: %v", namespace.Name, err)
		}
	})
	return namespace.Name
}

// namePrefix turns a test's name into a prefix for names that are DNS labels.
func namePrefix(test string) string {
	label := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		case r >= 'A' && r <= 'Z':
			return r - 'A' + 'a'
		default:
			return '-'
		}
	}, test)
	return strings.Trim(label[:min(len(label), 40)], "-") + "-"
}
