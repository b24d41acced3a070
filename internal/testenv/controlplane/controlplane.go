// Package controlplane runs a real Kubernetes control plane for tests: etcd, kube-apiserver and,
// where asked for, kube-controller-manager with the controllers that make EndpointSlices. There
// is no kubelet: tests create Pods and write their status themselves. What a fake API server gets
// wrong (resource versions, watch bookmarks and expiry, streaming lists, protobuf, RBAC, bound
// tokens) is what Slicecast depends on most, hence the real one.
//
// etcd is of the version that Kubernetes itself is built with, wherever the tests run: kube-apiserver
// streams no lists on one from before 3.4.31 or 3.5.13.
//
// Every component can be stopped, killed, paused and started again on the same port and data.
// None outlives the test process, however that ends.
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

// What every control plane is set up with.
const (
	// ServiceCIDRs are the ranges that cluster IPs come from, IPv4 being the primary family.
	ServiceCIDRs = "10.96.0.0/16,fd00:10:96::/112"
	// Issuer is the issuer of ServiceAccount tokens, and their default audience.
	Issuer = "https://kubernetes.default.svc.cluster.local"
)

// Options of a control plane. The zero value is an API server on loopback, without controllers.
type Options struct {
	// Address the API server listens on, advertises, and has in its certificate; 127.0.0.1 if
	// zero. It must exist in the network namespace of the test process.
	Address netip.Addr
	// Controllers asks for a kube-controller-manager with the controllers for Endpoints,
	// EndpointSlices and their mirroring, namespaces, and garbage collection (which is what
	// removes the slices of a deleted Service).
	Controllers bool
	// ControllerFlags are more command line flags of kube-controller-manager, for instance
	// --max-endpoints-per-slice=5.
	ControllerFlags []string
	// APIServerFlags are more command line flags of kube-apiserver.
	APIServerFlags []string
	// OldAddresses has the API server admit the addresses and ranges that it admitted before Kubernetes
	// 1.36, and that clusters may still hold: with leading zeros, IPv4-mapped, and ranges with host bits.
	OldAddresses bool
}

// ControlPlane is a running control plane.
type ControlPlane struct {
	Etcd      *Process
	APIServer *Process
	// ControllerManager is nil without Options.Controllers.
	ControllerManager *Process

	dir      string
	lock     *os.File
	logf     func(format string, args ...any)
	spawner  *spawner
	pki      *pki
	etcdURL  string
	endpoint netip.AddrPort
	client   kubernetes.Interface
	borrowed *borrowed // nil: it is this process's own
}

// Start runs a control plane until the end of the test t. If t fails, it prints the ends of the
// components' logs.
func Start(t testing.TB, options Options) *ControlPlane {
	t.Helper()
	cp, err := start(t.Context(), options, t.Logf)
	require.NoError(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			cp.logTails()
		}
		if err := cp.stop(); err != nil {
			t.Error(err)
		}
	})
	return cp
}

// Around returns a test main that starts a control plane, stores it in *cp, runs the tests of m
// and ends it, so that one serves a whole package:
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

func (a around) Run() int {
	flag.Parse()
	if f := flag.Lookup("test.fuzzworker"); f != nil && f.Value.String() == "true" {
		return a.m.Run() // it runs no tests, so that no control plane is needed
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
	if err := cp.stop(); err != nil {
		logf("%v", err)
		return 1
	}
	return code
}

// Run starts a control plane for a program that is no test, which has to close it.
func Run(ctx context.Context, options Options) (*ControlPlane, error) {
	return start(ctx, options, func(string, ...any) {})
}

// Close ends a control plane that Run has started, and removes its files.
func (cp *ControlPlane) Close() error { return cp.stop() }

func start(ctx context.Context, options Options, logf func(string, ...any)) (_ *ControlPlane, err error) {
	began := time.Now()
	if !options.Address.IsValid() {
		options.Address = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	cp := &ControlPlane{logf: logf, spawner: newSpawner()}
	defer func() {
		if err != nil {
			err = fmt.Errorf("control plane: %w", errors.Join(err, cp.stop()))
		}
	}()
	if lent := os.Getenv(LentVariable); lent != "" {
		return cp, cp.borrow(lent, options)
	}
	if cp.dir, cp.lock, err = makeDir(); err != nil {
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
	if options.Controllers {
		if err := cp.startControllerManager(ctx, options); err != nil {
			return nil, err
		}
	}
	logf("control plane ready at %s after %s", cp.URL(), time.Since(began).Round(time.Millisecond))
	return cp, nil
}

// stop kills what runs and removes the files. Nothing is worth a graceful end here.
func (cp *ControlPlane) stop() error {
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

// processes in the order in which they depend on each other, dependents first.
func (cp *ControlPlane) processes() []*Process {
	var all []*Process
	for _, p := range []*Process{cp.ControllerManager, cp.APIServer, cp.Etcd} {
		if p != nil {
			all = append(all, p)
		}
	}
	return all
}

func (cp *ControlPlane) logTails() {
	for _, p := range cp.processes() {
		cp.logf("---- the end of the log of %s:\n%s", p.Name(), p.LogTail())
	}
}

// URL of the API server.
func (cp *ControlPlane) URL() string { return "https://" + cp.endpoint.String() }

// AdminConfig is for a client that may do everything and is not rate-limited.
func (cp *ControlPlane) AdminConfig() *rest.Config {
	return cp.ConfigFor("admin", "system:masters")
}

// Client may do everything and is not rate-limited.
func (cp *ControlPlane) Client() kubernetes.Interface { return cp.client }

// ConfigFor is for a client that authenticates with a certificate as this user in these groups,
// which has the rights that RBAC gives it. It is not rate-limited.
func (cp *ControlPlane) ConfigFor(user string, groups ...string) *rest.Config {
	cert, key := cp.pki.client(user, groups)
	config := cp.anonymousConfig()
	config.CertData, config.KeyData = cert, key
	return config
}

// ConfigForToken is for a client that authenticates with a bearer token, such as a
// ServiceAccount's. It is not rate-limited.
func (cp *ControlPlane) ConfigForToken(token string) *rest.Config {
	config := cp.anonymousConfig()
	config.BearerToken = token
	return config
}

func (cp *ControlPlane) anonymousConfig() *rest.Config {
	return &rest.Config{
		Host:            cp.URL(),
		TLSClientConfig: rest.TLSClientConfig{CAData: cp.pki.ca.PEM(), ServerName: serverName},
		QPS:             -1,
	}
}

// Kubeconfig writes config as a kubeconfig file that lasts as long as t, and returns its path.
func (cp *ControlPlane) Kubeconfig(t testing.TB, config *rest.Config) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, cp.WriteKubeconfig(path, config))
	return path
}

// WriteKubeconfig writes config as a kubeconfig file.
func (*ControlPlane) WriteKubeconfig(path string, config *rest.Config) error {
	return writeKubeconfig(path, config)
}

// Namespace creates a namespace with a name derived from the test's, and has it deleted, with
// all that is in it, when t ends. Deletion goes on in the background and needs
// Options.Controllers.
func (cp *ControlPlane) Namespace(t testing.TB) string {
	t.Helper()
	namespace, err := cp.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{GenerateName: namePrefix(t.Name())},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	t.Cleanup(func() {
		// Nobody else ends pods that were scheduled: there is no kubelet.
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
