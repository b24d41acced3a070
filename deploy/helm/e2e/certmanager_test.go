// This test proves that servers with certificates of cert-manager serve agents, and use a renewed
// certificate without a restart. Then the commands of the README change to the servers' own
// certificates and back, while no agent meets a server that it does not trust. cert-manager's
// controllers run beside the cluster.
package e2e

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/repository"
)

func init() {
	installs["cert-manager"] = certManager
	tools["cert-manager"] = []string{"internal/testenv/certmanager/build.sh"}
}

// renewPatience bounds the time until a kubelet has updated the files of a Secret, which may be
// more than a minute.
const renewPatience = 5 * time.Minute

// issuer is a CA for cert-manager. The arguments are its certificate and its key, in base64.
const issuer = `
apiVersion: v1
kind: Secret
metadata: {name: slicecast-ca, namespace: cert-manager}
type: kubernetes.io/tls
data: {tls.crt: %s, tls.key: %s}
---
apiVersion: cert-manager.io/v1
kind: ClusterIssuer
metadata: {name: slicecast}
spec: {ca: {secretName: slicecast-ca}}
`

func certManager(t *testing.T) {
	i := start(t)
	ca := i.startCertManager()

	i.helm("install", "slicecast", "../slicecast", "--set=certificates.mode=certManager",
		"--set=certificates.issuer.name=slicecast", "--set-file=certificates.caBundle="+ca)
	i.rollout(servers, "deployment/slicecast-server")
	i.rollout(agents, "daemonset/slicecast-agent")
	i.requireService()
	i.requireStatus()

	before := map[string]string{}
	for _, address := range i.serverAddresses() {
		before[address] = i.certificate(address).SerialNumber.String()
	}
	// This is what "cmctl renew" does.
	i.kubectl("--namespace="+servers, "patch", "certificate", "slicecast-server", "--subresource=status", "--type=merge",
		`--patch={"status":{"conditions":[{"type":"Issuing","status":"True","reason":"Test","message":"",`+
			`"lastTransitionTime":"`+time.Now().UTC().Format(time.RFC3339)+`"}]}}`)
	began := time.Now()
	for address, serial := range before {
		testenv.Eventually(t, renewPatience, func() error {
			if i.certificate(address).SerialNumber.String() == serial {
				return fmt.Errorf("server %s: still the certificate %s", address, serial)
			}
			return nil
		})
	}
	t.Logf("all servers have the renewed certificate after %s", time.Since(began).Round(time.Second))
	require.ElementsMatch(t, slices.Collect(maps.Keys(before)), i.serverAddresses(), "no server has been restarted")

	// Agents that start now accept the renewed certificate.
	i.kubectl("--namespace="+agents, "rollout", "restart", "daemonset/slicecast-agent")
	i.rollout(agents, "daemonset/slicecast-agent")
	i.requireService()
	i.requireStatus()
	i.requireChangesOfMode(ca)
}

// requireChangesOfMode requires that the README's commands change from certificates of cert-manager
// to the servers' own and back. Meanwhile, no agent meets a server that it does not trust, and no
// new connection to a Service fails.
func (i install) requireChangesOfMode(ca string) {
	i.Helper()
	const clients = "default"
	client := i.peers(clients, "client")[0]
	ctx, stop := context.WithCancel(i.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := i.Kubectl(ctx, "", "--namespace="+clients, "exec", client.name, "--", "sh", "-c",
			"while curl -sSk -m5 -o/dev/null https://kubernetes.default.svc.cluster.local/livez; do sleep .1; done; exit 1")
		ended <- err
		close(ended)
	}()
	defer func() {
		stop()
		for range ended {
			continue // the client was stopped
		}
	}()
	root, err := repository.Root()
	require.NoError(i, err)
	dir := i.TempDir()
	content, err := os.ReadFile(ca)
	require.NoError(i, err)
	require.NoError(i, os.WriteFile(filepath.Join(dir, "ca.crt"), content, 0o600))
	require.NoError(i, os.Symlink(filepath.Join(root, "deploy"), filepath.Join(dir, "deploy")))
	step := func(names ...string) {
		i.Helper()
		began := time.Now()
		var blocks [][2]string
		for _, name := range names {
			blocks = append(blocks, [2]string{"deploy/README.md", name})
		}
		i.run(dir, blocks...)
		i.rollout(servers, "deployment/slicecast-server")
		i.rollout(agents, "daemonset/slicecast-agent")
		i.requireStatus()
		logs := i.kubectl("--namespace="+agents, "logs", "--selector=app.kubernetes.io/name=slicecast-agent", "--tail=-1")
		require.NotContains(i, logs, "x509", "an agent does not trust a server")
		i.Logf("%s took %s", names, time.Since(began).Round(100*time.Millisecond))
	}
	step("servers-ca", "servers-secret", "with-own-ca")
	step("to-self")
	for _, address := range i.serverAddresses() {
		require.Equal(i, "CN=slicecast", i.certificate(address).Issuer.String())
	}
	step("to-own-cas")
	i.awaitCAs(filepath.Join(dir, "own.crt"))
	i.requireService()

	step("to-provided-cas")
	i.awaitCAs(filepath.Join(dir, "both.crt"))
	step("to-cert-manager")
	step("without-own-ca")
	i.requireService()
	select {
	case err := <-ended:
		require.NoError(i, err, "a connection failed")
	default:
	}
}

// awaitCAs waits until all agents have the CAs of a file.
func (i install) awaitCAs(path string) {
	i.Helper()
	want, err := os.ReadFile(path)
	require.NoError(i, err)
	for _, node := range i.Nodes {
		testenv.Eventually(i.T, renewPatience, func() error {
			have, err := node.Command(i.Context(), "sh", "-c",
				"cat /var/lib/kubelet/pods/*/volumes/kubernetes.io~configmap/ca/ca.crt").Output()
			if err == nil && strings.TrimSpace(string(have)) != strings.TrimSpace(string(want)) {
				err = fmt.Errorf("the agent of %s has other CAs: %s", node.Name, have)
			}
			return err
		})
	}
}

// startCertManager starts cert-manager with the ClusterIssuer slicecast, and returns the path of
// its CA certificate.
func (i install) startCertManager() (ca string) {
	i.Helper()
	controllers := tool("cert-manager")
	i.kubectl("apply", "--server-side", "--filename="+filepath.Join(filepath.Dir(controllers), "crds"))
	i.kubectl("wait", "--for=condition=Established", "crd", "--all")
	i.kubectl("create", "namespace", "cert-manager")
	i.startUntilEnd(exec.CommandContext(i.Context(), controllers, "--kubeconfig="+i.Kubeconfig), "cert-manager")
	authority, err := testca.New()
	require.NoError(i, err)
	key, err := authority.KeyPEM()
	require.NoError(i, err)
	encode := base64.StdEncoding.EncodeToString
	i.apply(fmt.Sprintf(issuer, encode(authority.PEM()), encode(key)))
	i.kubectl("wait", "--for=condition=Ready", "clusterissuer/slicecast", "--timeout="+patience.String())
	ca, err = authority.WriteCA(i.TempDir())
	require.NoError(i, err)
	return ca
}

// certificate returns the certificate of the server at an address.
func (i install) certificate(address string) *x509.Certificate {
	i.Helper()
	raw, err := i.Nodes[0].DialContext(i.Context(), "tcp", net.JoinHostPort(address, "8472"))
	require.NoError(i, err)
	defer raw.Close()
	// The servers ask for a client certificate after their own.
	conn := tls.Client(raw, &tls.Config{ServerName: serverName, InsecureSkipVerify: true, NextProtos: []string{"h2"}})
	require.NoError(i, conn.HandshakeContext(i.Context()))
	return conn.ConnectionState().PeerCertificates[0]
}
