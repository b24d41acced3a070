// These tests prove which manifests are accepted, and that a problem names the file, the line and
// the field. What a bad document may have held is not removed.
package file

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
)

func newParser() parser {
	return parser{converter: source.NewConverter(""), log: slog.New(slog.DiscardHandler)}
}

// parsed returns the objects of a file as "line kind namespace/name", and its problems.
func parsed(name, text string) (objects, problems []string) {
	f := newParser().parse(name, []byte(text), nil)
	for _, o := range f.objects {
		objects = append(objects, fmt.Sprintf("%d %s", o.line, o.id))
	}
	for _, p := range f.problems {
		problems = append(problems, p.String())
	}
	return objects, problems
}

const good = `
apiVersion: v1
kind: Service
metadata: {name: good}
spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}
`

func TestParseReportsTheLine(t *testing.T) {
	for name, c := range map[string]struct {
		file, text string
		problem    string
		objects    []string // in addition to the bad one
	}{
		"syntax": {
			text:    "# a comment\n---" + good + "---\na: b\nc: d: e\n---" + good,
			problem: "x.yaml:9: mapping values are not allowed in this context: correct the YAML",
			objects: []string{"3 Service default/good", "11 Service default/good"},
		},
		"a key twice": {
			text:    "kind: Service\napiVersion: v1\nkind: Service\n",
			problem: `x.yaml:3: key "kind" already set in map: correct the YAML`,
		},
		"wrong type in a list, second document": {
			text:    good + "---\napiVersion: v1\nkind: Service\nmetadata:\n  name: web\nspec:\n  clusterIP: 10.96.0.2\n  ports:\n  - port: 80\n  - name: b\n    port: eighty\n",
			problem: "x.yaml:16: spec.ports[1].port: have string, want int32",
			objects: []string{"2 Service default/good"},
		},
		"wrong type of a whole": {
			text:    "apiVersion: v1\nkind: Service\nmetadata:\n  name: web\nspec:\n- 1\n",
			problem: "x.yaml:5: spec: have array, want v1.ServiceSpec",
		},
		"unknown field": {
			text:    "apiVersion: v1\nkind: Service\nmetadata:\n  name: web\nspec:\n  clusterIP: 10.96.0.2\n  ports:\n  - port: 80\n    prot: TCP\n",
			problem: `x.yaml:9: unknown field "spec.ports[0].prot": is it misspelled? It has no effect`,
			objects: []string{"1 Service default/web"},
		},
		"invalid address": {
			text:    "apiVersion: v1\nkind: Service\nmetadata:\n  name: web\nspec:\n  clusterIPs:\n  - 10.96.0.2\n  externalIPs:\n  - 192.0.2.1\n  - 192.0.2.256\n",
			problem: `x.yaml:10: Service default/web: spec.externalIPs[1]: "192.0.2.256" is not an IP address`,
		},
		"no cluster IP": {
			text: good + "---\napiVersion: v1\nkind: Service\nmetadata:\n  name: web\nspec:\n  ports: []\n",
			problem: "x.yaml:11: Service default/web: spec.clusterIP: is missing: no API server allocates it here: " +
				"set an address, or None for a headless Service",
			objects: []string{"2 Service default/good"},
		},
		"no node port": {
			text:    "apiVersion: v1\nkind: Service\nmetadata:\n  name: web\nspec:\n  type: NodePort\n  clusterIP: 10.96.0.2\n  ports:\n  - port: 80\n",
			problem: "x.yaml:9: Service default/web: spec.ports[0].nodePort: is missing: no API server allocates it here: set a port",
		},
		"wrong family in a slice": {
			text: "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: web-1\n  labels: {kubernetes.io/service-name: web}\n" +
				"addressType: IPv4\nendpoints:\n- addresses: [10.0.0.1]\n- addresses:\n  - fd00::1\n",
			problem: "x.yaml:10: EndpointSlice default/web-1: endpoints[1].addresses[0]: fd00::1 is not IPv4",
		},
		"no address type": {
			text:    "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: web-1\n  labels: {kubernetes.io/service-name: web}\n",
			problem: `x.yaml:1: EndpointSlice default/web-1: addressType: "" is not one of IPv4, IPv6, FQDN`,
		},
		"old version": {
			text:    "kind: EndpointSlice\napiVersion: discovery.k8s.io/v1beta1\nmetadata: {name: web-1}\n",
			problem: "x.yaml:1: apiVersion discovery.k8s.io/v1beta1 of EndpointSlice is not supported: use discovery.k8s.io/v1",
		},
		"old version of a ServiceCIDR": {
			text:    "kind: ServiceCIDR\napiVersion: networking.k8s.io/v1beta1\nmetadata: {name: kubernetes}\n",
			problem: "x.yaml:1: apiVersion networking.k8s.io/v1beta1 of ServiceCIDR is not supported: use networking.k8s.io/v1",
		},
		"no range": {
			text:    "kind: ServiceCIDR\napiVersion: networking.k8s.io/v1\nmetadata: {name: kubernetes}\nspec:\n  cidrs:\n  - 10.96.0.0/16\n  - \"fd00::\"\n",
			problem: `x.yaml:7: ServiceCIDR kubernetes: spec.cidrs[1]: "fd00::" is not a CIDR`,
		},
		"endpoints": {
			text:    "apiVersion: v1\nkind: Endpoints\nmetadata: {name: web}\nsubsets:\n- notReadyAddresses:\n  - ip: 10.0.0.1\n  - ip: nowhere\n  ports: [{port: 1}]\n",
			problem: `x.yaml:7: Endpoints default/web: subsets[0].notReadyAddresses[1].ip: "nowhere" is not an IP address`,
		},
		"misspelled kind":       {text: good + "---\napiVersion: v1\nkind: Servcie\n", problem: "x.yaml:7: apiVersion v1 has no kind Servcie: is it misspelled?", objects: []string{"2 Service default/good"}},
		"group that is none":    {text: "apiVersion: core/v1\nkind: Service\n", problem: "x.yaml:1: apiVersion core/v1 of Service is not supported: use v1"},
		"another group's":       {text: "apiVersion: apps/v1\nkind: Endpoints\n", problem: "x.yaml:1: apiVersion apps/v1 of Endpoints is not supported: use v1"},
		"version that is none":  {text: "apiVersion: v2\nkind: Node\n", problem: "x.yaml:1: apiVersion v2 of Node is not supported: use v1"},
		"slice of no group":     {text: "apiVersion: v1\nkind: EndpointSlice\n", problem: "x.yaml:1: apiVersion v1 of EndpointSlice is not supported: use discovery.k8s.io/v1"},
		"group of two parts":    {text: "apiVersion: a/b/c\nkind: Node\n", problem: "x.yaml:1: apiVersion: unexpected GroupVersion string: a/b/c: correct it"},
		"in a list of its kind": {text: "apiVersion: v1\nkind: NodeList\nitems:\n- metadata: {name: n1}\n- metadata: {}\n", problem: "x.yaml:5: metadata.name is missing: name the object", objects: []string{"4 Node n1"}},
		"no kind in a List":     {text: "apiVersion: v1\nkind: List\nitems:\n- metadata: {name: n1}\n", problem: "x.yaml:4: not a Kubernetes object: apiVersion and kind are required"},
		"no kind":               {text: "\n\nhello: world\n", problem: "x.yaml:3: not a Kubernetes object: apiVersion and kind are required"},
		"scalar":                {text: "# c\nhello\n", problem: "x.yaml:2: not a Kubernetes object"},
		"no name": {
			text: "apiVersion: v1\nkind: Node\nmetadata:\n  labels: {}\n", problem: "x.yaml:3: metadata.name is missing: name the object",
		},
		"item of a list": {
			text: "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: Node\n  metadata: {name: n1}\n" +
				"- apiVersion: v1\n  kind: Node\n  metadata: {name: n2}\n  spec:\n    podCIDRs:\n    - 10.0.0.0\n",
			problem: `x.yaml:12: Node n2: spec.podCIDRs[0]: "10.0.0.0" is not a CIDR`,
			objects: []string{"4 Node n1"},
		},
		"alias": {
			text: "apiVersion: v1\nkind: List\nx: &p\n- port: 0\nitems:\n- apiVersion: v1\n  kind: Service\n  metadata: {name: web}\n" +
				"  spec:\n    clusterIP: 10.96.0.1\n    ports: *p\n",
			problem: "x.yaml:4: Service default/web: spec.ports[0].port: 0 is not within 1 to 65535",
		},
		"JSON syntax": {
			file:    "x.json",
			text:    "{\"apiVersion\": \"v1\", \"kind\": \"Node\",\n\"metadata\": {\"name\": \"n1\"}}\n{\n\t\"apiVersion\": \"v1\"\n\t\"kind\": 1}",
			problem: "x.json:5: invalid character '\"' after object key:value pair: correct the JSON",
			objects: []string{"1 Node n1"},
		},
		"JSON that ends too early": {
			file: "x.json", text: "{\n\n", problem: "x.json:3: unexpected EOF: correct the JSON",
		},
		"JSON value": {
			file: "x.json",
			text: "{\"apiVersion\": \"v1\", \"kind\": \"Node\", \"metadata\": {\"name\": \"n1\"}}\n\n{\n\t\"apiVersion\": \"v1\",\n\t\"kind\": \"Node\",\n" +
				"\t\"metadata\": {\n\t\t\"name\": \"n2\",\n\t\t\"labels\": {\"a\": 1}\n\t}\n}\n",
			problem: "x.json:8: metadata.labels.a: have number, want string",
			objects: []string{"1 Node n1"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if c.file == "" {
				c.file = "x.yaml"
			}
			objects, problems := parsed(c.file, c.text)
			require.Equal(t, c.objects, objects)
			require.Len(t, problems, 1)
			require.True(t, strings.HasPrefix(problems[0], c.problem), "have %s\nwant %s", problems[0], c.problem)
		})
	}
}

func TestParseTakesWhatAnAPIServerTakes(t *testing.T) {
	objects, problems := parsed("x.yml", "\ufeff# nothing but a comment\n---\n---\n"+strings.ReplaceAll(good, "\n", "\r\n")+`--- # the rest
apiVersion: apps/v1
kind: Deployment
metadata: {name: ignored}
spec: {replicas: 3}
---
apiVersion: serving.knative.dev/v1
kind: Service
metadata: {name: ignored}
---
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Node, metadata: {name: n1, namespace: none}}
- apiVersion: discovery.k8s.io/v1
  kind: EndpointSlice
  metadata: {name: web-1, namespace: prod, labels: {kubernetes.io/service-name: web}}
  addressType: IPv6
  endpoints: [{addresses: ["fd00::1"], conditions: {ready: yes}}]
- apiVersion: v1
  kind: Endpoints
  metadata: {name: web}
- {apiVersion: networking.k8s.io/v1, kind: ServiceCIDR, metadata: {name: kubernetes}, spec: {cidrs: [10.96.0.0/16]}}
---
{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "headless"}, "spec": {"clusterIP": "None"}}
---
{"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSliceList", "metadata": {"resourceVersion": "7"}, "items": [{"metadata": {"name": "web-2"}, "addressType": "IPv4"}]}
---
{"apiVersion": "apps/v1", "kind": "DeploymentList", "items": [{"metadata": {"name": "web"}}]}
---
{"apiVersion": "example.com/v1", "kind": "AllowList", "items": ["a", 1]}
---
{"apiVersion": "v1", "kind": "List"}
---
{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"}}
---
{"apiVersion": "networking.k8s.io/v1beta1", "kind": "Ingress"}
`)
	require.Empty(t, problems)
	require.Equal(t, []string{
		"5 Service default/good", "22 Node n1", "23 EndpointSlice prod/web-1", "28 Endpoints default/web", "31 ServiceCIDR kubernetes", "33 Service default/headless",
		"35 EndpointSlice default/web-2",
	}, objects)
}

func TestParseKeepsWhatABadDocumentMayHaveHeld(t *testing.T) {
	p := newParser()
	document := func(name, ip string) string {
		return strings.NewReplacer("good", name, "10.96.0.1", ip).Replace(good) + "---\n"
	}
	names := func(f *file) string {
		var b bytes.Buffer
		for _, o := range f.objects {
			fmt.Fprintf(&b, "%s=%s ", o.id.name, o.model.(*model.Service).ClusterIPs[0])
		}
		return b.String()
	}
	f := p.parse("x.yaml", []byte(document("a", "10.0.0.1")+document("b", "10.0.0.2")+document("c", "10.0.0.3")), nil)
	require.Equal(t, "a=10.0.0.1 b=10.0.0.2 c=10.0.0.3 ", names(f))
	f = p.parse("x.yaml", []byte(document("a", "10.0.0.9")+document("b", "10.0.0.")), f)
	require.Equal(t, "a=10.0.0.9 b=10.0.0.2 c=10.0.0.3 ", names(f), "a is followed, b stays, and c may be meant by the bad one")
	f = p.parse("x.yaml", []byte("a: b: c"), f)
	require.Equal(t, "a=10.0.0.9 b=10.0.0.2 c=10.0.0.3 ", names(f))
	f = p.parse("x.yaml", []byte(document("a", "10.0.0.9")+document("b", "10.0.0.8")), f)
	require.Equal(t, "a=10.0.0.9 b=10.0.0.8 ", names(f))
	require.Empty(t, f.problems)
}

func TestPathAt(t *testing.T) {
	text := `{"a": [{"b": 1}, {"b": {"c": [1, 2, "three"]}}, "x"], "d": null, "e": {"f": false}}`
	for value, want := range map[string]string{
		`"three"`: "a[1].b.c[2]", `"x"`: "a[2]", "null": "d", "false": "e.f", `2`: "a[1].b.c[1]", `{"b": 1}`: "a[0]", `[`: "a",
	} {
		end := int64(strings.Index(text, value) + len(value))
		require.Equal(t, want, pathAt([]byte(text), end), value)
	}
}
