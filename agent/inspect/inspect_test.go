// These tests prove that inspect reads the rules of a real kernel and the pages of an agent, that
// each part has a bound, and that a part that fails does not stop the others.
package inspect

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func TestWrite(t *testing.T) {
	host := testenv.NewNetwork(t).AddNode("a").Host
	for _, command := range []string{"nft add table ip inspected", "iptables-nft -N INSPECTED"} {
		words := strings.Fields(command)
		_, err := host.Run(t.Context(), words[0], words[1:]...)
		require.NoError(t, err)
	}
	var out bytes.Buffer
	require.NoError(t, host.Do(func() error { return Write(t.Context(), Options{}, &out) }))
	parts := make(map[string]Part)
	for decoder := json.NewDecoder(&out); ; {
		var p Part
		err := decoder.Decode(&p)
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		parts[p.Name] = p
	}
	require.Len(t, parts, len(sources(Options{})))
	for name, text := range map[string]string{
		"kernel/version.txt": "Linux ", "kernel/sysctls.txt": "/proc/sys/net/ipv4/ip_forward: ", "kernel/addresses.txt": "lo mtu ",
		"rules/nftables.txt": "table ip inspected", "rules/iptables-nft-save.txt": ":INSPECTED ",
	} {
		require.Contains(t, parts[name].Content, text, name)
		require.Empty(t, parts[name].Error, name)
	}

	// Without the command nft, the kernel is asked.
	t.Setenv("PATH", t.TempDir())
	out.Reset()
	require.NoError(t, host.Do(func() error { return nftables(t.Context(), &out) }))
	require.Contains(t, out.String(), `table ip "inspected"`)
	out.Reset()
	require.NoError(t, run("iptables-save")(t.Context(), &out))
	require.Contains(t, out.String(), "is not in this image")
}

func TestPages(t *testing.T) {
	name := daemon.AgentServer
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Server", name)
		if r.URL.Path != "/metrics" {
			w.WriteHeader(http.StatusNotFound)
		}
		_, _ = fmt.Fprint(w, "slicecast_agent_up 1\n")
	}))
	defer server.Close()
	address := server.Listener.Addr().String()
	get := func(path string) Part { return source{path, page(address, path)}.part(t.Context(), maxPart) }
	require.Equal(t, Part{Name: "metrics", Content: "slicecast_agent_up 1\n"}, get("metrics"))
	require.Contains(t, get("flagz").Error, "404")
	name = "kube-proxy"
	require.Contains(t, get("metrics").Error, "another program answers")
	require.Empty(t, get("metrics").Content)
}

func TestBounds(t *testing.T) {
	read := func(content string, err error) func(context.Context, io.Writer) error {
		return func(_ context.Context, out io.Writer) error {
			_, failed := io.WriteString(out, content)
			return errors.Join(failed, err)
		}
	}
	require.Equal(t, Part{Name: "a", Content: "1234"}, source{"a", read("1234", nil)}.part(t.Context(), 4))
	require.Equal(t, Part{Name: "a", Content: "1234", Truncated: true}, source{"a", read("12345", nil)}.part(t.Context(), 4))
	require.Equal(t, Part{Name: "a", Content: "1", Error: "no more"}, source{"a", read("1", errors.New("no more"))}.part(t.Context(), 4))
	require.Equal(t, Part{Name: "a", Content: "\uFFFDb"}, source{"a", read("\xffb", nil)}.part(t.Context(), 4))
	require.True(t, source{"a", run("yes")}.part(t.Context(), 1000).Truncated)
	require.Contains(t, source{"a", run("false")}.part(t.Context(), 4).Error, "exit status 1")

	dir := t.TempDir()
	require.NoError(t, os.WriteFile(dir+"/one", []byte("1\n"), 0o600))
	require.NoError(t, os.WriteFile(dir+"/two", []byte("1\n2\n"), 0o600))
	require.NoError(t, os.Mkdir(dir+"/directory", 0o700))
	p := source{"a", files(dir+"/none", dir+"/*")}.part(t.Context(), maxPart)
	require.Equal(t, fmt.Sprintf("%s/one: 1\n%s/two:\n1\n2\n", dir, dir), p.Content)
	require.Empty(t, p.Error)
}
