// This test proves that the Services that servers serve are known by their command lines and by
// their configuration files in ConfigMaps, and that an error says what to do otherwise.
package fleet

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"sigs.k8s.io/yaml"
)

// mounted is the part of a Pod that mounts a ConfigMap in different ways.
const mounted = `
containers:
- name: sidecar
  volumeMounts: [{name: other, mountPath: /etc/slicecast}]
- name: server
  ports: [{name: grpc, containerPort: 8472}]
  volumeMounts:
  - {name: other, mountPath: /}
  - {name: all, mountPath: /etc/slicecast/}
  - {name: all, mountPath: /etc/one.yaml, subPath: server.yaml}
  - {name: items, mountPath: /etc/items}
  - {name: projected, mountPath: /etc/projected}
  - {name: broken, mountPath: /etc/broken}
  - {name: gone, mountPath: /etc/gone}
volumes:
- {name: other, emptyDir: {}}
- {name: all, configMap: {name: settings}}
- {name: items, configMap: {name: settings, items: [{key: server.yaml, path: sub/s.yaml}]}}
- name: projected
  projected:
    sources:
    - secret: {name: x}
    - configMap: {name: broken, items: [{key: a, path: a}]}
    - configMap: {name: settings, items: [{key: server.yaml, path: s.yaml}]}
- {name: broken, configMap: {name: broken}}
- {name: gone, configMap: {name: gone}}
`

// serverWithArgs returns the server in a Pod with the mounts above.
func serverWithArgs(t *testing.T, name string, args ...string) *Server {
	t.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "up", Name: name}}
	require.NoError(t, yaml.UnmarshalStrict([]byte(mounted), &pod.Spec))
	pod.Spec.Containers[1].Args = args
	return newServer(pod)
}

func TestServiceProxyName(t *testing.T) {
	configMap := func(name, key, content string) *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "up", Name: name}, Data: map[string]string{key: content}}
	}
	client := fake.NewClientset(configMap("settings", "server.yaml", "serviceProxyName: from-file\nfieldOfAnotherVersion: x\n"), configMap("broken", "server.yaml", "{"))
	f := &Fleet{client: client, options: Options{Timeout: time.Minute}}
	for name, test := range map[string]struct {
		servers [][]string
		want    string
		unknown bool
		says    string // in the error
	}{
		"none":                       {unknown: true},
		"default":                    {servers: [][]string{{"--source=kube"}}},
		"command line":               {servers: [][]string{{"--source=kube", "--service-proxy-name=chosen"}, {"--service-proxy-name", "chosen"}}, want: "chosen"},
		"relays":                     {servers: [][]string{{"--source=upstream"}}, unknown: true},
		"relays and servers":         {servers: [][]string{{"--source=upstream"}, {"--service-proxy-name=chosen"}}, want: "chosen"},
		"another command line":       {servers: [][]string{{"--bind-address"}}, unknown: true},
		"file":                       {servers: [][]string{{"--config=/etc/slicecast/server.yaml"}}, want: "from-file"},
		"the command line wins":      {servers: [][]string{{"--config=/etc/slicecast/server.yaml", "--service-proxy-name="}}},
		"subPath":                    {servers: [][]string{{"--config=/etc/one.yaml"}}, want: "from-file"},
		"items":                      {servers: [][]string{{"--config=/etc/items/sub/s.yaml"}}, want: "from-file"},
		"projected":                  {servers: [][]string{{"--config=/etc/projected/s.yaml"}}, want: "from-file"},
		"file and command line":      {servers: [][]string{{"--config=/etc/items/sub/s.yaml"}, {"--service-proxy-name=from-file"}}, want: "from-file"},
		"differ":                     {servers: [][]string{{"--service-proxy-name=a"}, {"--source=kube"}}, says: "up/server-0 has --service-proxy-name=a, and up/server-1 has --service-proxy-name=: give all"},
		"no ConfigMap":               {servers: [][]string{{"--config=/etc/other/server.yaml"}}, says: "--config=/etc/other/server.yaml is in no ConfigMap; set --service-proxy-name"},
		"no such item":               {servers: [][]string{{"--config=/etc/projected/x.yaml"}}, says: "is in no ConfigMap"},
		"no such key":                {servers: [][]string{{"--config=/etc/slicecast/x.yaml"}}, says: "the ConfigMap up/settings has no key x.yaml"},
		"no YAML":                    {servers: [][]string{{"--config=/etc/broken/server.yaml"}}, says: "the key server.yaml of the ConfigMap up/broken: "},
		"the ConfigMap is not there": {servers: [][]string{{"--config=/etc/gone/server.yaml"}}, says: `"gone" not found; set --service-proxy-name`},
	} {
		t.Run(name, func(t *testing.T) {
			var servers []*Server
			for i, args := range test.servers {
				servers = append(servers, serverWithArgs(t, "server-"+string(rune('0'+i)), args...))
			}
			got, known, err := f.ServiceProxyName(t.Context(), servers)
			if test.says != "" {
				require.ErrorContains(t, err, test.says)
				return
			}
			require.NoError(t, err)
			require.Equal(t, test.want, got)
			require.Equal(t, !test.unknown, known)
		})
	}

	ends := serverWithArgs(t, "old", "--service-proxy-name=before")
	ends.missing = errTerminating
	got, _, err := f.ServiceProxyName(t.Context(), []*Server{ends, serverWithArgs(t, "new", "--service-proxy-name=after")})
	require.NoError(t, err)
	require.Equal(t, "after", got)
}
