// This test proves how little an API server is asked when it comes back. 16 servers follow it, and
// 4 relays follow these; it is killed and started again. Each server then lists each kind once at
// most, and is refused a few times at most. The API server's own audit log says what it was asked
// and what it answered, and the metrics of its priority and fairness say that the log has it all.
package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
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
	// fleetServers watch the API server. fleetRelays follow one of them each, and ask it nothing.
	fleetServers, fleetRelays = 16, 4
	// fleetPort is the first of their ports; each has three.
	fleetPort = 20000
	// fleetGroup may do everything, but its requests wait like others for the API server's priority
	// and fairness, unlike those of system:masters.
	fleetGroup = "fleet"
	// firstPause and lastPause are those of a server after refusals. They double in between.
	firstPause, lastPause = 200 * time.Millisecond, 5 * time.Second
	// auditPolicy logs each request of the servers.
	auditPolicy = `{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
		"rules": [{"level": "Metadata", "userGroups": ["` + fleetGroup + `"]}, {"level": "None"}]}`
)

// kinds are what each server follows at once. While an API server starts, it forbids everything to
// everybody. A server that may not see ServiceCIDRs does without them for a minute.
var kinds = []string{"services", "endpointslices", "nodes"}

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

// request is what a server asks the API server about a resource. The field what holds one of these
// words, or the verb of any other request:
//   - list: a list or its first page, or a watch that begins with a list
//   - page: a later page of a list
//   - probe: a list of one object, to learn the API server's resourceVersion
//   - watch: a watch that begins at a resourceVersion
type request struct{ server, resource, what string }

// answer is what the API server answered to one kind of request.
type answer struct {
	codes       map[int]int // how often it had an HTTP status code
	refused     int         // how often it was another than 200
	first, last time.Time   // when these requests arrived
}

type answers map[request]answer

// total returns the number of requests that were answered.
func (a answers) total() (sum int) {
	for _, of := range a {
		sum += of.codes[http.StatusOK] + of.refused
	}
	return sum
}

// summary returns the numbers for all servers together, by kind and what was asked.
func (a answers) summary() map[string]map[int]int {
	sums := make(map[string]map[int]int)
	for r, of := range a {
		key := r.what + " " + r.resource
		if sums[key] == nil {
			sums[key] = make(map[int]int)
		}
		for code, n := range of.codes {
			sums[key][code] += n
		}
	}
	return sums
}

// answered returns the answers that the audit log has after a number of lines, and the number of
// lines that it has.
func (f *fleet) answered(since int) (a answers, lines int) {
	f.t.Helper()
	file, err := os.Open(f.audit)
	require.NoError(f.t, err)
	defer file.Close()
	return readAudit(f.t, file, since)
}

func readAudit(t *testing.T, log io.Reader, since int) (a answers, lines int) {
	t.Helper()
	a = make(answers)
	scanner := bufio.NewScanner(log)
	scanner.Buffer(nil, 1<<20)
	for ; scanner.Scan(); lines++ {
		if lines < since {
			continue
		}
		var event struct {
			Stage, Verb, RequestURI string
			User                    struct{ Username string }
			ObjectRef               struct{ Resource string }
			ResponseStatus          struct{ Code int }
			At                      time.Time `json:"requestReceivedTimestamp"`
		}
		require.NoError(t, json.Unmarshal(scanner.Bytes(), &event))
		if event.Verb == "watch" && event.Stage != "ResponseStarted" {
			continue // the end of a watch
		}
		at, err := url.Parse(event.RequestURI)
		require.NoError(t, err)
		r := request{event.User.Username, event.ObjectRef.Resource, event.Verb}
		switch query := at.Query(); {
		case query.Get("sendInitialEvents") == "true":
			r.what = "list"
		case event.Verb == "list" && query.Get("continue") != "":
			r.what = "page"
		case event.Verb == "list" && query.Get("limit") == "1":
			r.what = "probe"
		}
		of := a[r]
		if of.codes == nil {
			of.codes = make(map[int]int)
		}
		of.codes[event.ResponseStatus.Code]++
		if event.ResponseStatus.Code != http.StatusOK {
			if of.refused++; of.refused == 1 {
				of.first = event.At
			}
			of.last = event.At
		}
		a[r] = of
	}
	require.NoError(t, scanner.Err())
	return a, lines
}

// admitted returns how many requests the API server's priority and fairness has dispatched and
// rejected since its start. Those that are exempt from it are of the API server itself, of the
// test, and of what waits for the API server to be ready.
func (f *fleet) admitted() (dispatched, rejected int, err error) {
	client, err := rest.HTTPClientFor(f.cp.AdminConfig())
	if err != nil {
		return 0, 0, err
	}
	defer client.CloseIdleConnections()
	answer, err := client.Get(f.cp.URL() + "/metrics")
	if err != nil {
		return 0, 0, err
	}
	defer answer.Body.Close()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(answer.Body)
	sum := func(name string) (sum int) {
		for _, m := range families[name].GetMetric() {
			if !slices.ContainsFunc(m.GetLabel(), func(l *dto.LabelPair) bool { return l.GetName() == "priority_level" && l.GetValue() == "exempt" }) {
				sum += int(m.GetCounter().GetValue())
			}
		}
		return sum
	}
	return sum("apiserver_flowcontrol_dispatched_requests_total"), sum("apiserver_flowcontrol_rejected_requests_total"), err
}

// settle waits until each server follows each kind, and until priority and fairness has counted as
// many requests as the audit log has after a number of lines. It returns the answers until then.
func (f *fleet) settle(since int) (a answers) {
	f.t.Helper()
	testenv.Eventually(f.t, settleTimeout, func() error {
		a, _ = f.answered(since)
		for i := range fleetServers {
			for _, kind := range kinds {
				list, watch := a[request{fmt.Sprint("server-", i), kind, "list"}].codes, a[request{fmt.Sprint("server-", i), kind, "watch"}].codes
				if list[http.StatusOK]+watch[http.StatusOK] == 0 {
					return fmt.Errorf("server-%d does not follow %s yet: lists %v, watches %v", i, kind, list, watch)
				}
			}
		}
		dispatched, rejected, err := f.admitted()
		if err != nil {
			return err
		}
		if have := a.total(); have != dispatched+rejected {
			return fmt.Errorf("the audit log has %d requests, priority and fairness has dispatched %d and rejected %d", have, dispatched, rejected)
		}
		f.t.Logf("priority and fairness has dispatched %d requests and rejected %d: %v", dispatched, rejected, a.summary())
		return nil
	})
	return a
}

// few returns an error if a server asked for a kind more often than it may. One list, one watch and
// one probe may be answered. As many of each may be refused as fit between growing pauses. Two
// lists may be refused without a pause, because client-go falls back from one way to the other.
func (a answers) few() error {
	for r, of := range a {
		if !slices.Contains([]string{"list", "probe", "watch"}, r.what) || of.codes[http.StatusOK] > 1 {
			return fmt.Errorf("%+v: answered %v", r, of.codes)
		}
		attempts := 1
		for pause, left := firstPause, of.last.Sub(of.first); left >= pause; pause = min(2*pause, lastPause) {
			left -= pause
			attempts++
		}
		allowed := attempts
		if r.what == "list" {
			allowed *= 2
		}
		if of.refused > allowed {
			return fmt.Errorf("%+v: refused %d times within %v, want %d at most: %v", r, of.refused, of.last.Sub(of.first), allowed, of.codes)
		}
	}
	return nil
}

// TestFew makes up audit logs of one server that keeps the bounds, or does not.
func TestFew(t *testing.T) {
	const list, stream, watch, probe = "", "?sendInitialEvents=true", "?resourceVersion=7", "?limit=1"
	for name, c := range map[string]struct {
		query string
		codes []int
		pause time.Duration
		want  string
	}{
		"a list":                 {query: list, codes: []int{200}},
		"two lists":              {query: list, codes: []int{200, 200}, pause: time.Second, want: "answered map[200:2]"},
		"two lists by watches":   {query: stream, codes: []int{200, 200}, pause: time.Second, want: "answered map[200:2]"},
		"a second page":          {query: "?continue=x", codes: []int{200}, want: "answered map[200:1]"},
		"two probes":             {query: probe, codes: []int{200, 200}, pause: time.Second, want: "answered map[200:2]"},
		"two watches":            {query: watch, codes: []int{200, 200}, pause: time.Second, want: "answered map[200:2]"},
		"another way to list":    {query: list, codes: []int{403, 403, 200}},
		"refusals with pauses":   {query: watch, codes: []int{403, 429, 200}, pause: firstPause},
		"refusals soon":          {query: watch, codes: []int{403, 429, 200}, pause: firstPause / 2, want: "refused 2 times within 100ms, want 1 at most: map[200:1 403:1 429:1]"},
		"refused for long":       {query: list, codes: []int{429, 504, 410, 429}, pause: 5 * time.Second},
		"a storm of lists":       {query: list, codes: slices.Repeat([]int{429}, 40), pause: firstPause / 4, want: "refused 40 times within 1.95s, want 8 at most"},
		"a storm of probes":      {query: probe, codes: slices.Repeat([]int{504}, 40), pause: firstPause, want: "refused 40 times within 7.8s, want 6 at most"},
		"a storm of watch-lists": {query: stream, codes: slices.Repeat([]int{410}, 9), want: "refused 9 times within 0s, want 2 at most"},
	} {
		t.Run(name, func(t *testing.T) {
			verb := "list"
			if c.query == stream || c.query == watch {
				verb = "watch"
			}
			var log strings.Builder
			at := time.Unix(1, 0).UTC()
			for _, code := range c.codes {
				for _, stage := range []string{"ResponseStarted", "ResponseComplete"} {
					if verb == "watch" || stage == "ResponseComplete" {
						fmt.Fprintf(&log, `{"stage": %q, "verb": %q, "requestURI": "/api/v1/services%s", "user": {"username": "server-0"}, `, stage, verb, c.query)
						fmt.Fprintf(&log, `"objectRef": {"resource": "services"}, "responseStatus": {"code": %d}, "requestReceivedTimestamp": %q}`+"\n", code, at.Format(time.RFC3339Nano))
					}
				}
				at = at.Add(c.pause)
			}
			a, _ := readAudit(t, strings.NewReader(log.String()), 0)
			require.Equal(t, len(c.codes), a.total())
			if err := a.few(); c.want == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, c.want)
			}
		})
	}
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
	require.NoError(t, f.settle(0).few())

	for round := range 2 {
		require.NoError(t, f.cp.APIServer.Kill())
		_, since := f.answered(0)
		require.NoError(t, f.cp.APIServer.Start(t.Context()))
		for i := range 100 * round { // the second time, the watches are to begin before many changes
			create(fmt.Sprint("missed-", i))
		}
		after := fmt.Sprint("after-", round)
		create(after)
		f.awaitService(after)
		require.NoError(t, f.settle(since).few())
	}
}
