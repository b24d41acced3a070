// This test proves who may read an agent's metrics over TLS: observers and operators with a client
// certificate, and ServiceAccounts with a token, as a real API server decides. It also proves that
// the port is bounded.
package app

import (
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/bounded"
	"github.com/slicecast/slicecast/internal/bounded/boundedtest"
	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

func newCA(t *testing.T) *testca.CA {
	t.Helper()
	ca, err := testca.New()
	require.NoError(t, err)
	return ca
}

// startMetrics starts an agent with metrics. It returns their address, a function that requests
// them with the given client certificates, and a certificate that the agent accepts.
func startMetrics(t *testing.T, ca *testca.CA) (address string, get func(certs ...tls.Certificate) (string, error), scraper tls.Certificate) {
	t.Helper()
	dir := t.TempDir()
	caFile, err := ca.WriteCA(dir)
	require.NoError(t, err)
	serving, err := ca.Server("127.0.0.1")
	require.NoError(t, err)
	cert, key, err := testca.Write(dir, "metrics", serving)
	require.NoError(t, err)
	scraper, err = ca.Client("prometheus", "slicecast:observers")
	require.NoError(t, err)

	address = freeAddress(t)
	start(t, "--source=file", "--manifests="+t.TempDir(), "--programmer=printer", "--secure-metrics-bind-address="+address,
		"--metrics-cert-file="+cert, "--metrics-key-file="+key, "--metrics-client-ca-file="+caFile)
	get = func(certs ...tls.Certificate) (string, error) {
		return scrape(t, address, "", &tls.Config{RootCAs: ca.Pool(), Certificates: certs})
	}
	require.Eventually(t, func() bool {
		body, err := get(scraper)
		return err == nil && strings.Contains(body, "slicecast_agent_service_ports 0")
	}, 10*time.Second, 10*time.Millisecond)
	return address, get, scraper
}

// TestMetricsPortIsBounded asserts that the metrics port keeps only few connections of clients that
// ask for nothing, and that metrics can be scraped meanwhile.
func TestMetricsPortIsBounded(t *testing.T) {
	address, get, scraper := startMetrics(t, newCA(t))
	crowd := boundedtest.NewCrowd(t, address)
	for i := range 2000 {
		crowd.Join(netip.MustParseAddr("127.0.0.1"), "")
		if i%200 == 0 {
			_, err := get(scraper)
			require.NoError(t, err)
			require.LessOrEqual(t, crowd.Held(), bounded.Metrics.PerAddress)
		}
	}
	body, err := get(scraper)
	require.NoError(t, err)
	require.Contains(t, body, `slicecast_agent_displaced_connections_total{port="metrics"}`)
}

// scrape returns the metrics at an address. An answer that is not OK is an error.
func scrape(t *testing.T, address, token string, config *tls.Config) (string, error) {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: config}}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+address+"/metrics", http.NoBody)
	require.NoError(t, err)
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	r, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer func() { require.NoError(t, r.Body.Close()) }()
	b, err := io.ReadAll(r.Body)
	if err == nil && r.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", r.Status, b)
	}
	return string(b), err
}

func TestMetricsRequireARole(t *testing.T) {
	ca := newCA(t)
	_, get, _ := startMetrics(t, ca)
	_, err := get()
	require.ErrorContains(t, err, "401 Unauthorized: no credentials: use a client certificate of a CA in --metrics-client-ca-file")
	for role, allowed := range map[string]bool{"system:masters": true, "slicecast:relays": false, "": false} {
		certificate, err := ca.Client("somebody", role)
		require.NoError(t, err)
		_, err = get(certificate)
		if allowed {
			require.NoError(t, err, role)
		} else {
			require.ErrorContains(t, err, "403 Forbidden", role)
		}
	}
	node, err := ca.Node("node")
	require.NoError(t, err)
	_, err = get(node)
	require.ErrorContains(t, err, "403 Forbidden")
}

// TestMetricsByToken checks that an agent without certificates shows its metrics to the
// ServiceAccounts that it is told of, asks the API server once for many scrapes, and asks it
// nothing about the tokens of others.
func TestMetricsByToken(t *testing.T) {
	cluster := controlplane.Start(t, controlplane.Options{})
	namespace, client := cluster.Namespace(t), cluster.Client()
	token := func(account, audience string) string {
		t.Helper()
		answer, err := client.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), account, &authenticationv1.TokenRequest{
			Spec: authenticationv1.TokenRequestSpec{Audiences: []string{audience}},
		}, metav1.CreateOptions{})
		require.NoError(t, err)
		return answer.Status.Token
	}
	for _, account := range []string{"prometheus", "stranger"} {
		_, err := client.CoreV1().ServiceAccounts(namespace).Create(t.Context(), &corev1.ServiceAccount{
			ObjectMeta: metav1.ObjectMeta{Name: account},
		}, metav1.CreateOptions{})
		require.NoError(t, err)
	}
	address := freeAddress(t)
	start(t, "--source=file", "--manifests="+t.TempDir(), "--programmer=printer", "--node-name=node-1",
		"--secure-metrics-bind-address="+address, "--metrics-token-audience=metrics",
		"--metrics-service-accounts="+namespace+"/prometheus",
		"--kubeconfig="+cluster.Kubeconfig(t, cluster.AdminConfig()))
	var certificates []string
	get := func(token string) (string, error) {
		return scrape(t, address, token, &tls.Config{
			InsecureSkipVerify: true, // nobody can verify it
			VerifyConnection: func(s tls.ConnectionState) error {
				certificates = append(certificates, s.PeerCertificates[0].SerialNumber.String())
				return s.PeerCertificates[0].VerifyHostname("node-1")
			},
		})
	}
	good := token("prometheus", "metrics")
	require.Eventually(t, func() bool { // the agent has to listen
		_, err := get(good)
		return err == nil
	}, time.Minute, 200*time.Millisecond)
	before, err := get(good)
	require.NoError(t, err)
	again, err := get(good)
	require.NoError(t, err)
	for _, body := range []string{before, again} {
		require.Contains(t, body, "\nslicecast_agent_service_ports 0\n")
	}
	reviews := regexp.MustCompile(`slicecast_agent_token_reviews_total{budget="(known|others)"} [1-9]\d*`)
	once := []string{`slicecast_agent_token_reviews_total{budget="known"} 1`}
	require.Equal(t, once, reviews.FindAllString(before, -1))
	require.Equal(t, once, reviews.FindAllString(again, -1), "verdicts are reused")

	// A tenant has as many valid tokens as it wants. None of them costs a review.
	for range 30 {
		_, err = get(token("stranger", "metrics"))
		require.ErrorContains(t, err, "403 Forbidden")
		require.ErrorContains(t, err, "add it to --metrics-service-accounts")
	}
	after, err := get(good)
	require.NoError(t, err)
	require.Equal(t, once, reviews.FindAllString(after, -1))
	_, err = get(token("prometheus", "metrics"))
	require.NoError(t, err)

	_, err = get("")
	require.ErrorContains(t, err, "401 Unauthorized")
	_, err = get(token("prometheus", "slicecast"))
	require.ErrorContains(t, err, "401 Unauthorized: the token is not valid for the audience")
	for _, serial := range certificates {
		require.Equal(t, certificates[0], serial)
	}
}
