// This test proves that servers with certificates of cert-manager serve agents, and use a renewed
// certificate without a restart. cert-manager's controllers run beside the cluster.
package e2e

import (
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"maps"
	"net"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/testenv"
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
		before[address] = i.serial(address)
	}
	// This is what "cmctl renew" does.
	i.kubectl("--namespace="+servers, "patch", "certificate", "slicecast-server", "--subresource=status", "--type=merge",
		`--patch={"status":{"conditions":[{"type":"Issuing","status":"True","reason":"Test","message":"",`+
			`"lastTransitionTime":"`+time.Now().UTC().Format(time.RFC3339)+`"}]}}`)
	began := time.Now()
	for address, serial := range before {
		testenv.Eventually(t, renewPatience, func() error {
			if i.serial(address) == serial {
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

// serial returns the serial number of the certificate that the server at an address has.
func (i install) serial(address string) string {
	i.Helper()
	raw, err := i.Nodes[0].DialContext(i.Context(), "tcp", net.JoinHostPort(address, "8472"))
	require.NoError(i, err)
	defer raw.Close()
	// The servers ask for a client certificate after their own.
	conn := tls.Client(raw, &tls.Config{ServerName: serverName, InsecureSkipVerify: true, NextProtos: []string{"h2"}})
	require.NoError(i, conn.HandshakeContext(i.Context()))
	return conn.ConnectionState().PeerCertificates[0].SerialNumber.String()
}
