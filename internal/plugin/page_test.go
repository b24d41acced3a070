// These tests prove that browsers of this machine see the pages of real servers, with the rights of
// the manifests, and that nobody else does: neither other users, nor pages of other sites. What a
// hostile server sends cannot reach beyond that server.
package plugin

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/slicecast/slicecast/internal/daemon"
)

// servedPages is a running command.
type servedPages struct {
	t *testing.T
	// out is what the command has printed, and addresses are the pages', by the servers' names.
	out       string
	addresses map[string]string
	// end ends the command, and returns its exit code.
	end func() int
}

// servePages runs the command until it has printed the addresses.
func (e *environment) servePages(args ...string) *servedPages {
	e.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	root := NewCommand()
	root.SetArgs(append([]string{"--kubeconfig=" + e.kubeconfig, "page"}, args...))
	read, write := io.Pipe()
	var out bytes.Buffer
	root.SetOut(&out)
	root.SetErr(write)
	ended := make(chan int, 1)
	go func() {
		_, err := daemon.Execute(ctx, root)
		ended <- Code(root, err)
		_ = write.Close()
	}()
	line, err := bufio.NewReader(read).ReadString('\n')
	require.NoError(e, err)
	require.Equal(e, "Ctrl-C ends this.\n", line)
	p := &servedPages{t: e.T, out: out.String(), addresses: make(map[string]string)}
	for _, m := range regexp.MustCompile(`(?m)^slicecast-system/(\S+) +(http://127\.0\.0\.1:\d+/\w{26}/page/)$`).FindAllStringSubmatch(p.out, -1) {
		p.addresses[m[1]] = m[2]
	}
	stopped := false
	p.end = func() int {
		stopped = true
		cancel()
		return <-ended
	}
	e.Cleanup(func() {
		if !stopped {
			p.end()
		}
	})
	return p
}

// received is an answer. Its body is open until the test ends.
type received struct {
	StatusCode int
	Header     http.Header
	Trailer    func() http.Header // once the body has been read
	Body       io.Reader
}

// get makes a request with a header, such as "Host: other".
func (p *servedPages) get(address, header string) received {
	p.t.Helper()
	method := http.MethodGet
	if header == http.MethodPost {
		method, header = header, ""
	}
	r, err := http.NewRequestWithContext(p.t.Context(), method, address, nil)
	require.NoError(p.t, err)
	if name, value, ok := strings.Cut(header, ": "); ok {
		if name == "Host" {
			r.Host = value
		}
		r.Header.Set(name, value)
	}
	response, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(r)
	require.NoError(p.t, err)
	p.t.Cleanup(func() { _ = response.Body.Close() })
	return received{response.StatusCode, response.Header, func() http.Header { return response.Trailer }, response.Body}
}

func TestPages(t *testing.T) {
	e := newEnvironment(t)
	e.server("server-1")
	e.server("server-2")
	e.eventually(fine, nil, "status")
	e.pod(serverNamespace, "pending", "slicecast-server", "server", "", serverArgs(), corev1.PodPending)
	e.pod(serverNamespace, "pageless", "slicecast-server", "server", "node-0", serverArgs(), corev1.PodRunning)
	p := e.servePages()
	require.Len(t, p.addresses, 2)
	require.Regexp(t, `slicecast-system/pending +the Pod is Pending`, p.out)
	require.Regexp(t, `slicecast-system/pageless +it serves no page: start it with --metrics-bind-address`, p.out)
	for _, address := range p.addresses {
		r := p.get(address, "")
		require.Equal(t, http.StatusOK, r.StatusCode)
		body, err := io.ReadAll(r.Body)
		require.NoError(t, err)
		require.Contains(t, string(body), "<title>Slicecast</title>")
		require.Equal(t, http.StatusOK, p.get(address+"main.js", "Sec-Fetch-Site: same-origin").StatusCode)
		r = p.get(address+"events", "")
		require.Equal(t, http.StatusOK, r.StatusCode)
		events := bufio.NewReader(r.Body)
		for line := ""; line != "event: complete\n"; { // the stream is passed on as it comes
			line, err = events.ReadString('\n')
			require.NoError(t, err)
		}
		require.Equal(t, http.StatusNotFound, p.get(address+"service?namespace=a&name=b", "").StatusCode)

		root := strings.TrimSuffix(address, "/page/")
		for _, c := range []struct {
			address, header string
			want            int
		}{
			{address, "Host: attacker.example:80", http.StatusMisdirectedRequest},
			{address, "Origin: http://attacker.example", http.StatusForbidden},
			{address, "Origin: null", http.StatusForbidden},
			{address, "Sec-Fetch-Site: cross-site", http.StatusForbidden},
			{address, "Sec-Fetch-Site: same-site", http.StatusForbidden},
			{address, http.MethodPost, http.StatusMethodNotAllowed},
			{root + "/metrics", "", http.StatusNotFound},
			{root + "/page/%2e%2e/metrics", "", http.StatusNotFound},
			{root[:len(root)-1] + "x/page/", "", http.StatusNotFound},
			{regexp.MustCompile(`/\w{26}/`).ReplaceAllString(address, "/"), "", http.StatusNotFound},
		} {
			r := p.get(c.address, c.header)
			require.Equal(t, c.want, r.StatusCode, "%s %s", c.address, c.header)
			require.Equal(t, pagePolicy, r.Header.Get("Content-Security-Policy"))
		}
	}
	require.Equal(t, incomplete, p.end())

	p = e.servePages("server-2")
	require.Len(t, p.addresses, 1)
	require.Contains(t, p.addresses, "server-2")
	require.Equal(t, fine, p.end())
	r := e.run("page", "server-3", "slicecast-system/server-1")
	require.Equal(t, incomplete, r.code)
	require.Contains(t, r.errors, `there is no server "server-3": kubectl slicecast status lists all`)
	r = e.run("page", "pending")
	require.Equal(t, incomplete, r.code)
	require.Contains(t, r.out, "the Pod is Pending")
}

// TestPagesOfAHostileServer checks that what a server says of cookies and policies does not count,
// and that it gets none of what the browser says.
func TestPagesOfAHostileServer(t *testing.T) {
	e := newEnvironment(t)
	asked := make(chan *http.Request, 2)
	hostile := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked <- r
		if r.URL.Query().Has("switch") {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err == nil {
				_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: any\r\n\r\nanything")
				_ = conn.Close()
			}
			return
		}
		w.Header().Set("Link", "<https://attacker.example/>; rel=preload")
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Set("Trailer", "X-Trailer")
		defer func() { w.Header().Set("X-Trailer", "a"); w.Header().Set(http.TrailerPrefix+"X-Other", "b") }()
		defer func() { _, _ = io.WriteString(w, "body") }()
		for _, name := range []string{
			"Refresh", "Clear-Site-Data", "Location", "Report-To", "Reporting-Endpoints", "Server", "Strict-Transport-Security",
			"Service-Worker-Allowed", "SourceMap", "X-Anything", "Content-Disposition", "Www-Authenticate", "Access-Control-Allow-Credentials",
		} {
			w.Header().Set(name, "hostile")
		}
		w.Header().Set("Content-Type", "text/plain")
		w.Header().Set("Set-Cookie", "a=b")
		w.Header().Set("Content-Security-Policy", "default-src *")
		w.Header().Set("Access-Control-Allow-Origin", "*")
	}))
	defer hostile.Close()
	e.pod(serverNamespace, "hostile", "slicecast-server", "server", "node-0",
		[]string{"--bind-address=:8472", "--metrics-bind-address=:8474", "--insecure-plaintext"}, corev1.PodRunning)
	e.kubelet.Serve(serverNamespace, "hostile", 8474, strings.TrimPrefix(hostile.URL, "http://"))
	p := e.servePages()
	r := p.get(p.addresses["hostile"]+"events?a=b", "Cookie: session=secret")
	require.Equal(t, http.StatusOK, r.StatusCode)
	content, err := io.ReadAll(r.Body)
	require.NoError(t, err)
	require.Equal(t, "body", string(content))
	require.Empty(t, r.Trailer())
	names := slices.Sorted(maps.Keys(r.Header))
	require.Equal(t, []string{
		"Cache-Control", "Content-Security-Policy", "Content-Type", "Cross-Origin-Opener-Policy", "Cross-Origin-Resource-Policy", "Date",
		"Referrer-Policy", "X-Content-Type-Options",
	}, names)
	require.Equal(t, []string{"text/plain"}, r.Header["Content-Type"])
	require.Equal(t, pagePolicy, r.Header.Get("Content-Security-Policy"))
	require.Empty(t, r.Header.Get("Set-Cookie"))
	require.Empty(t, r.Header.Get("Access-Control-Allow-Origin"))
	r = p.get(p.addresses["hostile"]+"events?switch", "Upgrade: any")
	require.Equal(t, http.StatusBadGateway, r.StatusCode, "no other protocol")
	got := <-asked
	again := <-asked
	for _, sent := range []*http.Request{got, again} {
		for name := range sent.Header {
			require.Contains(t, requestHeaders, name)
		}
	}
	require.Equal(t, "/page/events?a=b", got.URL.String())
	require.Empty(t, got.Header.Get("Cookie"))
	hostile.Close()
	r = p.get(p.addresses["hostile"], "")
	require.Equal(t, http.StatusBadGateway, r.StatusCode)
	body, err := io.ReadAll(r.Body)
	require.NoError(t, err)
	require.Contains(t, string(body), "slicecast-system/hostile does not answer: ")
	require.Equal(t, fine, p.end())
}
