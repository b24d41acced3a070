// This test proves how little an API server is asked when it comes back: 20 servers and relays
// follow it, it is killed and started again, and each server lists each kind once at most. The API
// server's own audit log says what it was asked.
package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

const (
	// fleetServers watch the API server. fleetRelays follow one of them each.
	fleetServers, fleetRelays = 16, 4
	// fleetPort is the first of their ports; each has three.
	fleetPort = 20000
	// fleetGroup may do everything, but its requests wait like others for the API server's priority
	// and fairness, unlike those of system:masters.
	fleetGroup = "fleet"
	// auditPolicy logs each list and each start of a watch.
	auditPolicy = `{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
		"rules": [{"level": "Metadata", "verbs": ["list", "watch"]}, {"level": "None"}]}`
)

// fleet is many servers of one API server.
type fleet struct {
	t       *testing.T
	cp      *controlplane.ControlPlane
	audit   string
	members []*process
	sockets map[*process]string // for operators' questions
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	dir := t.TempDir()
	f := &fleet{t: t, audit: filepath.Join(dir, "audit.log"), sockets: make(map[*process]string)}
	f.cp = controlplane.Start(t, controlplane.Options{Address: network.World.IPv4, APIServerFlags: []string{
		"--audit-log-path=" + f.audit, "--audit-log-mode=blocking", "--audit-policy-file=" + writeFile(t, dir, "policy.json", []byte(auditPolicy)),
	}})
	_, err := f.cp.Client().RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: fleetGroup},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "Group", Name: fleetGroup}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	ca, cert, key := writeServingCertificate(t, dir, network.World.IPv4.String())
	clients := writeFile(t, dir, "clients.crt", f.cp.AdminConfig().CAData)
	for i := range fleetServers + fleetRelays {
		port := fleetPort + 3*i
		name := fmt.Sprint("server-", i)
		args := []string{
			fmt.Sprintf("--bind-address=%s:%d", network.World.IPv4, port), "--tls-cert-file=" + cert, "--tls-private-key-file=" + key,
			"--client-ca-file=" + clients, "--debug-socket=" + filepath.Join(dir, name+".sock"), "--drain-window=100ms",
		}
		if i < fleetServers {
			args = append(args, "--kubeconfig="+f.cp.Kubeconfig(t, f.cp.ConfigFor(name, fleetGroup)))
		} else {
			upstream := netip.AddrPortFrom(network.World.IPv4, uint16(fleetPort+3*(i-fleetServers)))
			clientCert, clientKey := writeClientCertificate(t, dir, name, f.cp.ConfigFor(name, "slicecast:relays"))
			args = append(args, "--source=upstream", "--upstream-servers="+upstream.String(),
				"--upstream-ca-file="+ca, "--upstream-client-cert-file="+clientCert, "--upstream-client-key-file="+clientKey)
		}
		p := newProcess(t, network.World, serverCommand, name, fmt.Sprint("127.0.0.1:", port+1), args)
		p.Start()
		f.members, f.sockets[p] = append(f.members, p), filepath.Join(dir, name+".sock")
	}
	for _, p := range f.members {
		p.AwaitReady()
	}
	return f
}

// asked is how often a user asked for a kind since a line of the audit log, by what it asked.
type asked struct{ lists, probes, watches int }

// asked returns what users have asked, by user and kind, since a number of lines, and the number of
// lines there are now.
func (f *fleet) asked(since int) (by map[[2]string]*asked, lines int) {
	f.t.Helper()
	file, err := os.Open(f.audit)
	require.NoError(f.t, err)
	defer file.Close()
	by = make(map[[2]string]*asked)
	scanner := bufio.NewScanner(file)
	scanner.Buffer(nil, 1<<20)
	for ; scanner.Scan(); lines++ {
		var event struct {
			Stage, Verb, RequestURI string
			User                    struct{ Username string }
			ObjectRef               struct{ Resource string }
			ResponseStatus          struct{ Code int }
		}
		require.NoError(f.t, json.Unmarshal(scanner.Bytes(), &event))
		if lines < since || !strings.HasPrefix(event.User.Username, "server-") || event.ResponseStatus.Code != http.StatusOK {
			continue
		}
		at, err := url.Parse(event.RequestURI)
		require.NoError(f.t, err)
		key := [2]string{event.User.Username, event.ObjectRef.Resource}
		a := by[key]
		if a == nil {
			a = &asked{}
			by[key] = a
		}
		switch query := at.Query(); {
		case event.Verb == "watch" && event.Stage != "ResponseStarted", query.Get("continue") != "":
		case query.Get("sendInitialEvents") == "true":
			a.lists++
		case event.Verb == "watch":
			a.watches++
		case query.Get("limit") == "1":
			a.probes++ // one object, to learn the API server's resourceVersion
		default:
			a.lists++
		}
	}
	require.NoError(f.t, scanner.Err())
	return by, lines
}

// dispatched returns how many requests the API server's priority and fairness has admitted since
// its start, by flow schema.
func (f *fleet) dispatched() map[string]float64 {
	f.t.Helper()
	client, err := rest.HTTPClientFor(f.cp.AdminConfig())
	require.NoError(f.t, err)
	defer client.CloseIdleConnections()
	answer, err := client.Get(f.cp.URL() + "/metrics")
	require.NoError(f.t, err)
	defer answer.Body.Close()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(answer.Body)
	require.NoError(f.t, err)
	sums := make(map[string]float64)
	for _, m := range families["apiserver_flowcontrol_dispatched_requests_total"].GetMetric() {
		for _, l := range m.GetLabel() {
			if l.GetName() == "flow_schema" {
				sums[l.GetValue()] += m.GetCounter().GetValue()
			}
		}
	}
	return sums
}

// awaitService waits until all servers and relays have a Service.
func (f *fleet) awaitService(name string) {
	f.t.Helper()
	for _, p := range f.members {
		testenv.Eventually(f.t, settleTimeout, func() error {
			out, err := network.World.Run(f.t.Context(), filepath.Join(binaries, serverCommand), "status",
				"--debug-socket="+f.sockets[p], "--service=default/"+name)
			if err != nil {
				return fmt.Errorf("%s: %w: %s", p.Name(), err, out)
			}
			return nil
		})
	}
}

func TestAPIServerComesBack(t *testing.T) {
	f := newFleet(t)
	create := func(name string) {
		_, err := f.cp.Client().CoreV1().Services("default").Create(t.Context(), &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
		}, metav1.CreateOptions{})
		require.NoError(t, err)
	}
	create("before")
	f.awaitService("before")
	by, since := f.asked(0)
	kinds := make(map[string]bool)
	for key, a := range by {
		kinds[key[1]] = true
		require.LessOrEqual(t, a.lists, 1, "%v at the start", key)
	}
	require.Subset(t, kinds, map[string]bool{"services": true, "endpointslices": true, "nodes": true})

	for round := range 2 {
		require.NoError(t, f.cp.APIServer.Kill())
		require.NoError(t, f.cp.APIServer.Start(t.Context()))
		for i := range 100 * round { // the second time, the watches are to begin before many changes
			create(fmt.Sprint("missed-", i))
		}
		after := fmt.Sprint("after-", round)
		create(after)
		f.awaitService(after)
		by, since = f.asked(since)
		var sum asked
		for key, a := range by {
			require.LessOrEqual(t, a.lists, 1, "%v, round %d", key, round)
			sum = asked{sum.lists + a.lists, sum.probes + a.probes, sum.watches + a.watches}
		}
		t.Logf("round %d: %d servers of %d kinds: %+v; admitted by flow schema: %v", round, fleetServers, len(kinds), sum, f.dispatched())
		// A new API server may know none of the versions from which watches could go on.
		require.Positive(t, sum.lists+sum.watches)
		require.LessOrEqual(t, sum.lists, fleetServers*len(kinds))
	}
}
