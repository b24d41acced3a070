// These tests prove that the command explain reads its objects and flags, prints what it finds, and
// says what is wrong with its flags.
package app

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
)

func runExplain(t *testing.T, node *testenv.Node, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	c := NewCommand()
	c.SetArgs(append([]string{"explain"}, args...))
	c.SetIn(strings.NewReader(verifiedObjects))
	c.SetOut(&out)
	c.SetErr(io.Discard)
	err := node.Do(func() error { return c.ExecuteContext(t.Context()) })
	return out.String(), err
}

func TestExplain(t *testing.T) {
	node := testenv.NewNetwork(t).AddNode("a")
	flags := []string{"--objects=-", "--", "--node-name=node-1", "--cluster-cidr=10.180.0.0/16"}
	out, err := runExplain(t, node, append([]string{"shop/web:http", "--from=10.180.0.7"}, flags...)...)
	require.ErrorIs(t, err, errDiffers)
	for _, part := range []string{
		"Decision for shop/web:http/TCP/IPv4:\ncluster set  all ready endpoints\n", "10.180.0.1:8080  false         yes          not used\n",
		"DIFFERS  clusterIP 10.96.0.80:80 from a pod (10.180.0.7)\n", "decided: cluster set, 2 backends; internalTrafficPolicy is Cluster\n",
		"keeps its source: backends answer pods directly\n", "kernel: is not translated\n",
		"Flows in conntrack: 0 to the Service, 0 of them stale; 0 directly to its endpoints\n",
	} {
		require.Contains(t, out, part)
	}
	out, err = runExplain(t, node, append([]string{"shop/none", "-o", "json"}, flags...)...)
	require.NoError(t, err)
	require.Contains(t, out, `"served": false`)

	// Beside kube-proxy, the Services with the label are Slicecast's.
	out, err = runExplain(t, node, append([]string{"shop/web", "--service-proxy-name=a", "-o", "json"}, append(flags, "--beside-kube-proxy")...)...)
	require.NoError(t, err)
	require.Contains(t, out, `"served": false`)
	// An agent without servers knows its Services.
	out, err = runExplain(t, node, append([]string{"shop/web", "--service-proxy-name=a"}, append(flags, "--source=kube")...)...)
	require.ErrorIs(t, err, errDiffers)
	require.Contains(t, out, "Decision for shop/web:http/TCP/IPv4")
}

func TestExplainFlags(t *testing.T) {
	node := testenv.NewNetwork(t).AddNode("a")
	for text, args := range map[string]string{
		"name one Service":               "--objects=-",
		"\"web\" is not the name":        "web --objects=-",
		"--objects is not set":           "shop/web",
		"--from: ":                       "shop/web --objects=- --from=x",
		"--output is \"x\"":              "shop/web --objects=- -o x",
		"no agent runs on this node":     "shop/web --objects=-",
		"do not contain the Node node-2": "shop/web --objects=- -- --node-name=node-2",
		"set --service-proxy-name to":    "shop/web --objects=- -- --node-name=node-1 --beside-kube-proxy",
	} {
		_, err := runExplain(t, node, strings.Fields(args)...)
		require.ErrorContains(t, err, text)
	}
}
