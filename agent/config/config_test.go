// These tests prove that exactly the fields in a configuration file become settings, and that an
// error names the field. The fuzz target proves that no content makes Parse fail in another way.
package config

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const head = "apiVersion: slicecast.io/v1alpha1\nkind: AgentConfiguration\n"

func TestSettingsReturnsTheFieldsThatAreSet(t *testing.T) {
	a, err := Parse([]byte(head + `
nodeName: node-1
servers: [a:1, b:1]
iptables: {masqueradeBit: 0, masqueradeAll: false, minSyncPeriod: 2s}
nodePortAddresses: []
detectLocal: {}
`))
	require.NoError(t, err)
	require.Equal(t, []Setting{
		{"nodeName", "node-name", []string{"node-1"}},
		{"servers", "servers", []string{"a:1", "b:1"}},
		{"iptables.masqueradeBit", "iptables-masquerade-bit", []string{"0"}},
		{"iptables.masqueradeAll", "masquerade-all", []string{"false"}},
		{"iptables.minSyncPeriod", "iptables-min-sync-period", []string{"2s"}},
		{"nodePortAddresses", "nodeport-addresses", []string{}},
	}, a.Settings())
	a, err = Parse([]byte(head))
	require.NoError(t, err)
	require.Empty(t, a.Settings())
}

func TestOneDocumentWithSeparators(t *testing.T) {
	a, err := Parse([]byte("# The agent's.\n---\n" + head + "nodeName: a\n---\n# That is all.\n"))
	require.NoError(t, err)
	require.Equal(t, "a", *a.NodeName)
}

func TestErrorsNameTheField(t *testing.T) {
	for name, c := range map[string]struct{ content, says string }{
		"unknown":          {head + "iptables: {masqueradebit: 3}", `unknown field "iptables.masqueradebit"`},
		"unknown section":  {head + "nftables: {masqueradeBit: 3}", `unknown field "nftables"`},
		"twice":            {head + "nodeName: a\nnodeName: b", `key "nodeName" already set`},
		"wrong type":       {head + "iptables: {masqueradeBit: many}", "iptables.masqueradeBit"},
		"a text for many":  {head + "servers: a:1", "servers"},
		"no duration":      {head + "iptables: {syncPeriod: 30}", "iptables.syncPeriod: have number, want string: use quotes, and for a duration a unit, such as 30s"},
		"another kind":     {"apiVersion: slicecast.io/v1alpha1\nkind: ServerConfiguration", "kind: AgentConfiguration"},
		"another version":  {"apiVersion: slicecast.io/v9\nkind: AgentConfiguration", "apiVersion: slicecast.io/v1alpha1"},
		"kube-proxy's":     {"apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration", "apiVersion: slicecast.io/v1alpha1"},
		"empty":            {"", "apiVersion: slicecast.io/v1alpha1"},
		"a list":           {"[1]", "the document is of type array: use an object with apiVersion"},
		"no YAML":          {"{", "yaml"},
		"two documents":    {head + "---\nnodeName: b", "more than one YAML document"},
		"two, on a line":   {head + "--- {nodeName: b}", "more than one YAML document"},
		"two, ended":       {head + "...\n# more\n--- # and\nnodeName: b", "more than one YAML document"},
		"a second broken":  {head + "---\n{", "yaml"},
		"something larger": {strings.Repeat("#", maxFile+1), "check that it is the right file"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse([]byte(c.content))
			require.ErrorContains(t, err, c.says)
		})
	}
}

// FuzzParse asserts that every content is either accepted or refused, and that what is accepted can
// be read as settings.
func FuzzParse(f *testing.F) {
	f.Add([]byte(head + "servers: [a:1]\niptables: {masqueradeBit: 3}"))
	f.Add([]byte("{}"))
	f.Fuzz(func(t *testing.T, content []byte) {
		a, err := Parse(content)
		if err != nil {
			return
		}
		for _, s := range a.Settings() {
			require.NotEmpty(t, s.Field)
			require.NotEmpty(t, s.Flag)
		}
	})
}
