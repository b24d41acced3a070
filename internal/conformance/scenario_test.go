// These tests prove that all cases can be read, and that what the runner does not understand in a
// case is an error that names the line.
package conformance

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestScenariosAreUnderstood(t *testing.T) {
	cases, err := Load("testdata/scenarios")
	require.NoError(t, err)
	flows := 0
	for _, c := range cases {
		for _, step := range c.All(IPTables) {
			flows += len(step.Flows)
		}
	}
	require.Equal(t, []int{60, 618}, []int{len(cases), flows}, "cases and flows")
}

// caseText is a valid case to which each test appends text.
const caseText = `
name: a case
node: {name: node1, ips: [192.168.0.2], zone: null, podCIDR: 10.180.0.0/24, podCIDRs: [10.180.0.0/24]}
objects: |
  apiVersion: v1
  kind: Namespace
  metadata: {name: ns1}
flows:
  - {name: a flow, from: node, proto: TCP, dst: 10.96.0.1, port: 80, expect: {verdict: DROP}}
steps:
  - name: a step
`

func TestWhatIsUnknownIsRefused(t *testing.T) {
	for _, test := range []struct{ name, add, want string }{
		{"nothing", "", ""},
		{"field", "    flushes: []\n", "line 12: field flushes not found"},
		{"field of a flow", "    flows: [{name: f, form: node}]\n", "field form not found"},
		{"field twice", "    name: again\n", `"name" already defined at line 11`},
		{"address", "    flows: [{dst: 10.96.0}]\n", "line 12: ParseAddr"},
		{"range", "    sessions: [{srcRange: 10.0.0.2-10.0.0.1}]\n", `line 12: "10.0.0.2-10.0.0.1" is not a range`},
		{"action", "    action: jump\n", `steps[0].action is "jump"`},
		{"origin", "    flows: [{name: f, from: moon, proto: TCP, dst: 10.96.0.1, port: 80, expect: {verdict: DROP}}]\n", `steps[0].flows[0] (f).from is "moon"`},
		{"verdict", "    flows: [{name: f, from: node, proto: TCP, dst: 10.96.0.1, port: 80, expect: {verdict: EAT}}]\n", `expect.verdict is "EAT"`},
		{"another one each time", "    flows: [{name: f, from: node, proto: UDP, dst: 10.96.0.1, port: 80, goesOn: true, expect: {verdict: DROP}}]\n", "goesOn: sport is missing"},
		{"masquerade", "    flows: [{name: f, from: node, proto: TCP, dst: 10.96.0.1, port: 80, expect: {backends: [10.180.0.1:80]}}]\n", `expect.masquerade is ""`},
		{"families", "    flows: [{name: f, from: node, src: '::1', proto: TCP, dst: 10.96.0.1, port: 80, expect: {verdict: DROP}}]\n", "different families"},
		{"patch", "    patch: [{kind: Node, name: node1, type: json, patch: {}}]\n", `steps[0].patch[0].type is "json"`},
		{"kind", "    delete: [{kind: Pod, namespace: ns1, name: p}]\n", `steps[0].delete[0]: kind "Pod" is not allowed`},
		{"namespace", "    delete: [{kind: Service, name: s}]\n", "steps[0].delete[0]: Service /s: namespace is missing"},
		{"object", "    apply: |\n      apiVersion: v1\n      kind: Pod\n      metadata: {name: p, namespace: ns1}\n", `document 1: kind "Pod" is not allowed`},
		{"entry", "    expectConntrack: {kept: [x]}\n", `no entry has the ID "x"`},
		{"health", "    healthChecks: [{from: external, url: u, expect: {}}]\n", "want a status or refused"},
		{"Slicecast's health", "    healthChecks: [{from: external, url: u, expect: {status: 200}, expectSlicecast: {}}]\n", "expectSlicecast: want a status or refused"},
		{"documents", "---\nname: another\n", "more than one YAML document"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			require.NoError(t, os.WriteFile(filepath.Join(dir, "c.yaml"), []byte(caseText+test.add), 0o600))
			cases, err := Load(dir)
			if test.want == "" {
				require.NoError(t, err)
				require.Len(t, cases, 1)
				return
			}
			require.ErrorContains(t, err, "c.yaml: ")
			require.ErrorContains(t, err, test.want)
		})
	}
	_, err := Load(t.TempDir())
	require.ErrorContains(t, err, "no scenarios")
}
