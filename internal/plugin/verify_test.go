// These tests prove that verify sends agents the objects of a real API server in a form that they
// read, compares again what differs, and says in the exit code what was found and what was not
// compared.
package plugin

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/slicecast/slicecast/agent/verify"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/show"
	"github.com/slicecast/slicecast/internal/source/file"
)

// answers returns a runner that answers with one text after the other, and then with an error.
func answers(texts ...string) runner {
	return func(_ context.Context, in io.Reader, _ ...string) ([]byte, error) {
		if _, err := io.Copy(io.Discard, in); err != nil {
			return nil, err
		}
		if len(texts) == 0 {
			return nil, errors.New("asked once more")
		}
		text := texts[0]
		texts = texts[1:]
		if strings.HasPrefix(text, "{") {
			return []byte(text), errors.New("exit code 1")
		}
		return nil, errors.New(text)
	}
}

// found returns what an agent prints of differences at some frontends.
func found(frontends ...string) string {
	var all []string
	for _, f := range frontends {
		all = append(all, fmt.Sprintf(`{"service": "a/b", "frontend": %q, "wanted": "lead", "found": "nothing", "rule": "rule 1", "text": "a/b at %s"}`, f, f))
	}
	return fmt.Sprintf(`{"node": "n", "frontends": 7, "packets": 20, "total": %d, "differences": [%s], "unjudged": []}`, len(all), strings.Join(all, ","))
}

func TestVerifyNodes(t *testing.T) {
	reads, maxAge := 0, time.Hour
	read := func(context.Context) (*clusterObjects, error) {
		reads++
		return &clusterObjects{version: fmt.Sprint(reads), node: func(context.Context, string) ([]byte, error) { return []byte("{}"), nil }}, nil
	}
	compare := func(texts ...[]string) *verifyReport {
		r := &verifyReport{nodes: make([]verifiedNode, len(texts))}
		runners := make([]runner, len(texts))
		for i := range texts {
			r.nodes[i].Node = fmt.Sprint("node-", i)
			runners[i] = answers(texts[i]...)
		}
		require.NoError(t, r.verify(t.Context(), nil, &freshObjects{read: read, maxAge: maxAge}, runners))
		return r
	}
	require.Equal(t, fine, compare([]string{found()}).code())
	require.Equal(t, 1, reads, "without differences, the objects are read once")

	r := compare([]string{found()}, []string{found("x", "y"), found("y", "z")}, []string{found("x"), found()})
	require.Equal(t, wrong, r.code())
	require.Equal(t, 0, r.nodes[2].Total, "what has ended is no difference")
	require.Equal(t, "y", r.nodes[1].Differences[0].Frontend)
	require.Equal(t, 1, r.nodes[1].Total)
	require.Equal(t, "3", r.nodes[1].Objects)

	r = compare([]string{found("x"), found("x")}, []string{"connection refused"})
	require.Equal(t, incomplete, r.code())
	require.Equal(t, "connection refused", r.nodes[1].Error)

	r = compare([]string{strings.Replace(found(), `"unjudged": []`, `"unjudged": ["rule 7"]`, 1)})
	require.Equal(t, incomplete, r.code())

	counted := func(n int) string {
		return strings.ReplaceAll(found("x"), `"lead"`, fmt.Sprintf(`"lead to %d backends"`, n))
	}
	r = compare([]string{counted(3), counted(4)})
	require.Equal(t, 1, r.nodes[0].Total, "a Service that changes meanwhile may differ nevertheless")

	reads, maxAge = 0, 0
	compare([]string{found()}, []string{found()}, []string{found()})
	require.Equal(t, 4, reads, "objects that have become old are read again")

	r = compare([]string{`{}`})
	require.Equal(t, "exit code 1", r.nodes[0].Error, "another version")
}

func TestVerifyPrints(t *testing.T) {
	var many []difference
	for i := range 12 {
		many = append(many, difference{Text: fmt.Sprint("difference ", i)})
	}
	r := &verifyReport{nodes: []verifiedNode{
		{Node: "node-1", Error: "no Pod of an agent runs on the node"},
		{Node: "node-2", Objects: "17", verification: verification{Frontends: 3, Packets: 9, Total: 12, Differences: many, Unjudged: []string{"rule 9"}, Tolerated: 4, Facts: []string{"another program masquerades"}}},
	}}
	for output, last := range map[string]string{"table": "difference 9\n… and 2 more (-o wide)\n", "wide": "difference 11\n"} {
		var out bytes.Buffer
		o := &show.Options{Output: output, Wide: true}
		require.NoError(t, o.Run(t.Context(), &out, func(context.Context) (show.Report, error) { return r, nil }))
		require.Contains(t, out.String(), "node-1 was not compared: no Pod of an agent runs on the node\n")
		require.Contains(t, out.String(), "node-2, compared with Services of resource version 17:\ndifference 0\n")
		require.Contains(t, out.String(), last)
		require.Contains(t, out.String(), "node-2, not judged:\nrule 9\n")
		require.Regexp(t, `TOLERATED.*\nnode-2 +3 +9 +12 +4 +1\n`, out.String())
		require.Equal(t, output == "wide", strings.Contains(out.String(), "another program masquerades"))
	}
}

func TestVerifyReadsObjects(t *testing.T) {
	e := newEnvironment(t)
	e.service("verified")
	e.agentPod("node-v")
	o, err := readObjects(t.Context(), plane.Client(), patience)
	require.NoError(t, err)
	require.NotEmpty(t, o.version)
	command := []string{"slicecast-agent", "verify", "--objects=-", "--output=json", "--service-proxy-name=a"}
	v, err := o.compare(t.Context(), "node-v", command, func(_ context.Context, in io.Reader, ran ...string) ([]byte, error) {
		require.Equal(t, command, ran)
		text, err := gzip.NewReader(in)
		require.NoError(t, err)
		objects := &verify.Objects{}
		require.NoError(t, file.Read(text, "stdin", file.Options{Log: slog.New(slog.DiscardHandler)}, objects))
		state, err := objects.State(view.Options{NodeName: "node-v"})
		require.NoError(t, err)
		require.NotEmpty(t, state.Node.ServiceCIDRs)
		backends := ""
		for id, p := range state.Ports {
			if id.Service.Name == "verified" && p.Cluster.Contains(netip.MustParseAddrPort("10.1.2.3:8080")) {
				backends = "found"
			}
		}
		require.Equal(t, "found", backends)
		return []byte(found("x")), errors.New("exit code 1")
	})
	require.NoError(t, err)
	require.Equal(t, 1, v.Total)
	_, err = o.compare(t.Context(), "node-w", command, nil)
	require.ErrorContains(t, err, "the API server has no Node of this name")

	e.pod(serverNamespace, "server-1", "slicecast-server", "server", "node-0", serverArgs(), corev1.PodRunning)
	r := e.run("verify", "node-v")
	require.Equal(t, incomplete, r.code)
	require.Contains(t, r.errors+r.out, "verify needs the right to list them in all namespaces")
}
