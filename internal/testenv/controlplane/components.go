package controlplane

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/testca"
)

var loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// startAttempts bounds the number of ports that a component tries if its port is taken.
const startAttempts = 5

// controllers are the controllers that the tests need, by their names in Kubernetes 1.37.
var controllers = []string{
	"endpoints-controller",
	"endpointslice-controller",
	"endpointslice-mirroring-controller",
	"garbage-collector-controller",
	"namespace-controller",
}

func (cp *ControlPlane) newProcess(name, binary string) *Process {
	return &Process{name: name, binary: binary, dir: cp.dir, spawner: cp.spawner, logf: cp.logf}
}

// startOnFreePort starts p on a free port of address, after configure has configured p for that
// port. Another process can take the port before p does, so startOnFreePort tries again with other
// ports.
func startOnFreePort(ctx context.Context, p *Process, address netip.Addr, configure func(netip.AddrPort)) error {
	var err error
	for range startAttempts {
		var endpoint netip.AddrPort
		if endpoint, err = freePort(address); err != nil {
			return err
		}
		configure(endpoint)
		if err = p.Start(ctx); err == nil || p.Running() || !p.portTaken() {
			return err
		}
	}
	return err
}

// freePort returns a free TCP port outside the kernel's range for outgoing connections and
// Kubernetes' range for node ports. Nothing else takes such a port while its component is down.
func freePort(address netip.Addr) (netip.AddrPort, error) {
	var err error
	for range 100 {
		endpoint := netip.AddrPortFrom(address, uint16(20000+rand.IntN(10000)))
		var listener net.Listener
		if listener, err = net.Listen("tcp", endpoint.String()); err == nil {
			return endpoint, listener.Close()
		}
	}
	return netip.AddrPort{}, fmt.Errorf("no free port on %s: %w", address, err)
}

func (cp *ControlPlane) startEtcd(ctx context.Context) error {
	binary, err := KubernetesBinary(ctx, "etcd")
	if err != nil {
		return err
	}
	cp.Etcd = cp.newProcess("etcd", binary)
	return startOnFreePort(ctx, cp.Etcd, loopback, func(endpoint netip.AddrPort) {
		cp.etcdURL = "http://" + endpoint.String()
		// The only member never dials its peer URL. A socket in the directory needs no port.
		cp.Etcd.args = []string{
			"--data-dir=" + cp.etcdData(),
			"--listen-client-urls=" + cp.etcdURL,
			"--advertise-client-urls=" + cp.etcdURL,
			"--listen-peer-urls=unix://peer:0",
			"--logger=zap",
			"--log-level=warn",
			// A machine that fails loses the test anyway.
			"--unsafe-no-fsync",
		}
		cp.Etcd.ready = func(ctx context.Context) error {
			_, err := get(ctx, nil, cp.etcdURL+"/health")
			return err
		}
	})
}

// EtcdVersion returns the version that etcd reports. It returns an empty string if the control
// plane is lent, because its etcd is not reachable from here.
func (cp *ControlPlane) EtcdVersion(ctx context.Context) (string, error) {
	if cp.Etcd == nil {
		return "", nil
	}
	body, err := get(ctx, nil, cp.etcdURL+"/version")
	if err != nil {
		return "", err
	}
	var version struct {
		Server string `json:"etcdserver"`
	}
	if err := json.Unmarshal(body, &version); err != nil {
		return "", fmt.Errorf("decode the version of etcd: %w", err)
	}
	return version.Server, nil
}

func (cp *ControlPlane) startAPIServer(ctx context.Context, options Options) error {
	binary, err := KubernetesBinary(ctx, "kube-apiserver")
	if err != nil {
		return err
	}
	cp.APIServer = cp.newProcess("kube-apiserver", binary)
	settings, err := cp.settings(options)
	if err != nil {
		return err
	}
	flags := slices.Concat(settings, options.APIServerFlags)
	if options.OldAddresses {
		flags = append(flags, "--feature-gates=StrictIPCIDRValidation=false")
	}
	return startOnFreePort(ctx, cp.APIServer, options.Address, func(endpoint netip.AddrPort) {
		cp.endpoint = endpoint
		cp.APIServer.args = append([]string{
			"--etcd-servers=" + cp.etcdURL,
			"--bind-address=" + endpoint.Addr().String(),
			"--advertise-address=" + endpoint.Addr().String(),
			fmt.Sprintf("--secure-port=%d", endpoint.Port()),
			"--tls-cert-file=" + cp.pki.file("serving.crt"),
			"--tls-private-key-file=" + cp.pki.file("serving.key"),
			"--client-ca-file=" + cp.pki.file("ca.crt"),
			"--service-account-issuer=" + Issuer,
			"--service-account-key-file=" + cp.pki.file("service-accounts.crt"),
			"--service-account-signing-key-file=" + cp.pki.file("service-accounts.key"),
			"--service-cluster-ip-range=" + ServiceCIDRs,
			"--allow-privileged=true",
		}, flags...)
		cp.APIServer.ready = cp.isReady(cp.URL() + "/readyz")
	})
}

// settings returns the flags of kube-apiserver that depend on the options. Loading the schemas for
// admission policies takes half the time of a start.
func (cp *ControlPlane) settings(options Options) ([]string, error) {
	policies := "MutatingAdmissionPolicy"
	if !options.Policies {
		policies += ",ValidatingAdmissionPolicy"
	}
	if !options.Nodes {
		return []string{
			"--authorization-mode=RBAC",
			// Pods need no ServiceAccount: no controller here would create it.
			"--disable-admission-plugins=ServiceAccount," + policies,
			// A loopback address is not valid as an endpoint of the kubernetes Service.
			"--endpoint-reconciler-type=none",
		}, nil
	}
	client, err := cp.pki.ca.Client("kube-apiserver", "system:masters")
	if err != nil {
		return nil, err
	}
	cert, key, err := testca.Write(cp.dir, "kubelet-client", client)
	return []string{
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction",
		"--disable-admission-plugins=" + policies,
		"--kubelet-client-certificate=" + cert,
		"--kubelet-client-key=" + key,
		"--kubelet-preferred-address-types=InternalIP",
	}, err
}

func (cp *ControlPlane) startControllerManager(ctx context.Context, options Options) error {
	binary, err := KubernetesBinary(ctx, "kube-controller-manager")
	if err != nil {
		return err
	}
	kubeconfig := filepath.Join(cp.dir, "kube-controller-manager.kubeconfig")
	if err := cp.WriteKubeconfig(kubeconfig, cp.ConfigFor("system:kube-controller-manager", "system:masters")); err != nil {
		return err
	}
	cp.ControllerManager = cp.newProcess("kube-controller-manager", binary)
	enabled := controllers
	if options.Nodes {
		enabled = []string{"*"}
	}
	return startOnFreePort(ctx, cp.ControllerManager, loopback, func(endpoint netip.AddrPort) {
		cp.ControllerManager.args = append([]string{
			"--kubeconfig=" + kubeconfig,
			"--controllers=" + strings.Join(enabled, ","),
			"--service-account-private-key-file=" + cp.pki.file("service-accounts.key"),
			"--root-ca-file=" + cp.pki.file("ca.crt"),
			"--leader-elect=false",
			"--bind-address=" + endpoint.Addr().String(),
			fmt.Sprintf("--secure-port=%d", endpoint.Port()),
			"--tls-cert-file=" + cp.pki.file("serving.crt"),
			"--tls-private-key-file=" + cp.pki.file("serving.key"),
			"--kube-api-qps=1000",
			"--kube-api-burst=1000",
		}, options.ControllerFlags...)
		cp.ControllerManager.ready = cp.isReady(fmt.Sprintf("https://%s/healthz", endpoint))
	})
}

func (cp *ControlPlane) startScheduler(ctx context.Context) error {
	binary, err := KubernetesBinary(ctx, "kube-scheduler")
	if err != nil {
		return err
	}
	kubeconfig := filepath.Join(cp.dir, "kube-scheduler.kubeconfig")
	if err := cp.WriteKubeconfig(kubeconfig, cp.ConfigFor("system:kube-scheduler")); err != nil {
		return err
	}
	cp.Scheduler = cp.newProcess("kube-scheduler", binary)
	return startOnFreePort(ctx, cp.Scheduler, loopback, func(endpoint netip.AddrPort) {
		cp.Scheduler.args = []string{
			"--kubeconfig=" + kubeconfig,
			"--leader-elect=false",
			"--bind-address=" + endpoint.Addr().String(),
			fmt.Sprintf("--secure-port=%d", endpoint.Port()),
			"--tls-cert-file=" + cp.pki.file("serving.crt"),
			"--tls-private-key-file=" + cp.pki.file("serving.key"),
		}
		cp.Scheduler.ready = cp.isReady(fmt.Sprintf("https://%s/readyz", endpoint))
	})
}

// isReady returns a function that requests url as an administrator and returns an error unless the
// answer is OK.
func (cp *ControlPlane) isReady(url string) func(context.Context) error {
	admin := cp.AdminConfig()
	return func(ctx context.Context) error {
		tlsConfig, err := rest.TLSConfigFor(admin)
		if err != nil {
			return err
		}
		_, err = get(ctx, tlsConfig, url)
		return err
	}
}

// get requests url over a new connection, so that the answer comes from the process that runs now.
func get(ctx context.Context, tlsConfig *tls.Config, url string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	transport := &http.Transport{TLSClientConfig: tlsConfig, DisableKeepAlives: true}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s: %s", url, response.Status, body)
	}
	return body, nil
}
