// This file runs the commands of docs/configuration.md and deploy/README.md that make an observer's
// certificate, exactly as they are there, and reads the servers' metrics with the certificate. It
// also reads the metrics of servers and agents with tokens, as a Prometheus does.
package e2e

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/repository"
)

// requireObserver requires that the pages' commands make certificates with which the metrics of all
// servers can be read, and that nobody reads them without one.
func (i install) requireObserver() {
	i.Helper()
	for _, blocks := range [][][2]string{
		{{"docs/configuration.md", "client-certificate"}},
		{{"deploy/README.md", "ca"}, {"deploy/README.md", "observer"}},
	} {
		dir := i.TempDir()
		i.run(dir, blocks...)
		require.NoFileExists(i, filepath.Join(dir, "ca.key"))
		for _, address := range i.serverAddresses() {
			metrics, err := i.metrics(dir, "observer", address)
			require.NoError(i, err)
			require.Contains(i, metrics, "\nslicecast_server_streams ")
			_, err = i.metrics(dir, "", address)
			require.ErrorContains(i, err, "401 Unauthorized: no credentials")
		}
	}
}

// run runs blocks of commands of pages, as administrator of the cluster, in a folder.
func (i install) run(dir string, blocks ...[2]string) {
	i.Helper()
	var all string
	for _, block := range blocks {
		commands, err := repository.Commands(block[0], block[1])
		require.NoError(i, err)
		all += strings.ReplaceAll(commands, "ISSUER", "slicecast") + "\n"
	}
	cmd := exec.CommandContext(i.Context(), "bash", "-euo", "pipefail", "-c", all)
	cmd.Dir = dir
	cmd.Env = []string{"HOME=" + dir, "KUBECONFIG=" + i.Kubeconfig, "PATH=" + filepath.Dir(i.KubectlPath) + ":" +
		filepath.Dir(tool("")) + ":" + os.Getenv("PATH")}
	out, err := cmd.CombinedOutput()
	require.NoError(i, err, "%v: %s", blocks, out)
}

// serverAddresses returns the addresses of the servers' pods.
func (i install) serverAddresses() (addresses []string) {
	i.Helper()
	pods, err := i.Client.CoreV1().Pods(servers).List(i.Context(), metav1.ListOptions{LabelSelector: serverPods})
	require.NoError(i, err)
	for _, pod := range pods.Items {
		addresses = append(addresses, pod.Status.PodIP)
	}
	require.NotEmpty(i, addresses)
	return addresses
}

// metrics returns the metrics of the server at an address, as read from the first node. The folder
// has the CA, and the certificate of the name unless that is empty.
func (i install) metrics(dir, name, address string) (string, error) {
	i.Helper()
	ca, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	require.NoError(i, err)
	config := &tls.Config{ServerName: serverName, RootCAs: x509.NewCertPool()}
	require.True(i, config.RootCAs.AppendCertsFromPEM(ca))
	if name != "" {
		certificate, err := tls.LoadX509KeyPair(filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key"))
		require.NoError(i, err)
		config.Certificates = []tls.Certificate{certificate}
	}
	return i.read(address+":8474", "", config)
}

// read returns the metrics at an address, as read from the first node, with a token unless that
// is empty.
func (i install) read(address, token string, config *tls.Config) (string, error) {
	i.Helper()
	transport := &http.Transport{DialContext: i.Nodes[0].DialContext, TLSClientConfig: config, DisableKeepAlives: true}
	request, err := http.NewRequestWithContext(i.Context(), http.MethodGet, "https://"+address+"/metrics", http.NoBody)
	require.NoError(i, err)
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", response.Status, body)
	}
	return string(body), err
}

// scraper is a ServiceAccount that may read metrics, as that of a Prometheus.
const scraper = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: scraper, namespace: default}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: scraper}
rules:
- nonResourceURLs: [/metrics]
  verbs: [get]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: scraper}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: scraper}
subjects:
- {kind: ServiceAccount, name: scraper, namespace: default}
`

// requireScraper switches the agents' metrics on, and requires that a Prometheus can read them and
// those of the servers with its tokens, and nobody without one.
func (i install) requireScraper() {
	i.Helper()
	i.helm("upgrade", "slicecast", "../slicecast", "--reuse-values", "--set=agent.metrics.enabled=true",
		"--set=agent.metrics.serviceAccounts={default/scraper}")
	i.rollout(agents, "daemonset/slicecast-agent")
	i.apply(scraper)
	defer func() {
		i.kubectl("delete", "clusterrolebinding,clusterrole", "scraper")
		i.kubectl("delete", "serviceaccount", "scraper", "--namespace=default")
	}()
	token := func(audience string) string {
		return strings.TrimSpace(i.kubectl("create", "token", "scraper", "--namespace=default", "--audience="+audience))
	}
	agentToken, serverToken := token("slicecast-agent"), token("slicecast")
	unverified := &tls.Config{InsecureSkipVerify: true}
	for _, node := range i.Nodes {
		address := net.JoinHostPort(node.IPv4.String(), "8476")
		testenv.Eventually(i.T, patience, func() error { // a verdict before the binding lasts ten seconds
			metrics, err := i.read(address, agentToken, unverified)
			if err == nil && !strings.Contains(metrics, "\nslicecast_agent_connected 1\n") {
				err = fmt.Errorf("metrics are missing: %s", metrics)
			}
			return err
		})
		_, err := i.read(address, "", unverified)
		require.ErrorContains(i, err, "401 Unauthorized: no credentials")
		_, err = i.read(address, serverToken, unverified)
		require.ErrorContains(i, err, "401 Unauthorized: the token is not valid")
	}
	for _, address := range i.serverAddresses() {
		metrics, err := i.read(address+":8474", serverToken, unverified)
		require.NoError(i, err)
		require.Contains(i, metrics, "\nslicecast_server_streams ")
	}
}
