// These tests prove that the command verify finds what a kernel lacks, and nothing once it is
// programmed; that it reads what kubectl prints, compressed or not; and what it says of wrong
// flags.
package app

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/programmer/nftables"
	"github.com/slicecast/slicecast/agent/verify"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/testenv"
)

// verifiedObjects are what kubectl prints of a Service with a NodePort and a Node.
const verifiedObjects = `{"kind": "List", "apiVersion": "v1", "items": [
{"kind": "Service", "apiVersion": "v1", "metadata": {"namespace": "shop", "name": "web"},
 "spec": {"type": "NodePort", "clusterIP": "10.96.0.80", "clusterIPs": ["10.96.0.80"],
  "ports": [{"name": "http", "port": 80, "nodePort": 30080}]}},
{"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "addressType": "IPv4",
 "metadata": {"namespace": "shop", "name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
 "ports": [{"name": "http", "port": 8080}], "endpoints": [{"addresses": ["10.180.0.1"]}, {"addresses": ["10.180.0.2"]}]},
{"kind": "Node", "apiVersion": "v1", "metadata": {"name": "node-1"},
 "status": {"addresses": [{"type": "InternalIP", "address": "192.168.0.2"}]}},
{"kind": "ServiceCIDR", "apiVersion": "networking.k8s.io/v1", "metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/16"]}}
]}`

// runVerify runs the command verify on a node.
func runVerify(t *testing.T, node *testenv.Node, in io.Reader, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	c := NewCommand()
	c.SetArgs(append([]string{"verify"}, args...))
	c.SetIn(in)
	c.SetOut(&out)
	c.SetErr(io.Discard)
	err := node.Do(func() error { return c.ExecuteContext(t.Context()) })
	return out.String(), err
}

func TestVerify(t *testing.T) {
	node := testenv.NewNetwork(t).AddNode("a")
	path := filepath.Join(t.TempDir(), "objects.json")
	require.NoError(t, os.WriteFile(path, []byte(verifiedObjects), 0o600))
	flags := []string{"--settle=0", "--", "--node-name=node-1", "--cluster-cidr=10.180.0.0/16"}

	out, err := runVerify(t, node, nil, append([]string{"--objects=" + path}, flags...)...)
	require.ErrorIs(t, err, errDiffers)
	require.Contains(t, out, "shop/web:http/TCP/IPv4: what comes to clusterIP 10.96.0.80:80 from a pod (10.180.255.254) "+
		"should lead to 2 backends of the cluster set, but is not translated")
	require.Contains(t, out, "nodePort 192.168.0.2:30080 from outside")

	options := view.Options{NodeName: "node-1", ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.180.0.0/16")}}
	state, err := (&verifyOptions{objects: path}).read(nil, "", options)
	require.NoError(t, err)
	require.NoError(t, node.Do(func() error {
		p, err := nftables.New(nftables.Options{Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			return err
		}
		defer p.Close()
		return p.Replace(t.Context(), state)
	}))

	var compressed bytes.Buffer
	w := gzip.NewWriter(&compressed)
	_, err = io.WriteString(w, verifiedObjects)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	out, err = runVerify(t, node, &compressed, append([]string{"--objects=-", "-o", "json"}, flags...)...)
	require.NoError(t, err, out)
	var r verify.Result
	require.NoError(t, json.Unmarshal([]byte(out), &r))
	require.Equal(t, 2, r.Frontends)
	require.Empty(t, r.Differences)

	// Beside kube-proxy, the Services with the label are Slicecast's.
	out, err = runVerify(t, node, nil, "--objects="+path, "--settle=0", "--service-proxy-name=a", "--", "--node-name=node-1",
		"--cluster-cidr=10.180.0.0/16", "--beside-kube-proxy")
	require.ErrorIs(t, err, errDiffers)
	require.Contains(t, out, "no elements of the Service port \"shop/web:http/TCP/IPv4\"")
	require.NotContains(t, out, "is not translated")

	// Another mask for pods is a difference.
	out, err = runVerify(t, node, nil, "--objects="+path, "--settle=0", "--", "--node-name=node-1", "--cluster-cidr=10.181.0.0/16")
	require.ErrorIs(t, err, errDiffers)
	require.Contains(t, out, "with its own source address, but it is masqueraded")
}

func TestVerifyFlags(t *testing.T) {
	node := testenv.NewNetwork(t).AddNode("a")
	for text, args := range map[string]string{
		"--objects is not set":           "",
		"--settle is -1s":                "--objects=- --settle=-1s",
		"no agent runs on this node":     "--objects=-",
		"--output is \"x\"":              "--objects=- -o x",
		"unknown flag: --nothing":        "--objects=- -- --nothing",
		"servers choose its Services":    "--objects=- -- --node-name=node-1 --beside-kube-proxy",
		"no such file or directory":      "--objects=/nowhere -- --node-name=node-1",
		"--cluster-cidr: \"x\" is not a": "--objects=- -- --cluster-cidr=x",
		"do not contain the Node node-2": "--objects=- -- --node-name=node-2",
	} {
		_, err := runVerify(t, node, strings.NewReader(verifiedObjects), strings.Fields(args)...)
		require.ErrorContains(t, err, text)
	}
	_, err := runVerify(t, node, strings.NewReader(`{"kind": "Service"`), "--objects=-", "--", "--node-name=node-1")
	require.ErrorContains(t, err, "read objects from --objects: unexpected EOF")
}
