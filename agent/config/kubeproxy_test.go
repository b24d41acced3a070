// These tests prove that no setting of kube-proxy is lost in silence: for each field of the
// configuration type of kube-proxy, found by reflection, a value is either carried over or
// reported.
package config

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/yaml"

	"github.com/slicecast/slicecast/internal/configfile"
)

// given contains values for fields whose valid values do not follow from their type.
var given = map[string][]any{
	"mode":               {modeIPVS, modeNFTables},
	"detectLocalMode":    {"NodeCIDR", "BridgeInterface"},
	"bindAddress":        {"192.168.0.2", "::1"},
	"healthzBindAddress": {"127.0.0.1:1"},
	"metricsBindAddress": {"0.0.0.0:10249", "127.0.0.1:1"},
	"clusterCIDR":        {"10.0.0.0/8"},
	"nodePortAddresses":  {[]string{"10.0.0.0/8"}, []string{"127.0.0.0/8"}},
	"logging.format":     {"json"},
	"ipvs.scheduler":     {"lc", "ovf"},
	// On Linux, the first three gates change how kube-proxy 1.36 and 1.37 serve Services. The others
	// stand for gates that do not.
	"featureGates": {
		map[string]bool{"AllowServiceExternalIPs": false}, map[string]bool{"PreferSameTrafficDistribution": false},
		map[string]bool{"MultiCIDRServiceAllocator": false}, map[string]bool{"KubeProxyNFTablesLocalhostNodePorts": true},
		map[string]bool{"AllAlpha": true}, map[string]bool{"ContextualLogging": false},
	},
}

// kubeProxyDefaults contains explicit values that mean the same as no value.
var kubeProxyDefaults = map[string]any{"iptables.localhostNodePorts": true}

// fieldValues adds to out, for each field of a type by its path, values other than kube-proxy's
// default.
func fieldValues(t *testing.T, path string, of reflect.Type, out map[string][]any) {
	t.Helper()
	if values, ok := given[path]; ok {
		out[path] = values
		return
	}
	switch reflect.New(of).Interface().(type) {
	case *metav1.Duration, *logsapi.TimeOrMetaDuration:
		out[path] = []any{"7s"}
		return
	case **metav1.Duration:
		out[path] = []any{"7s", "0s"}
		return
	case *resource.QuantityValue:
		out[path] = []any{"7"}
		return
	case *logsapi.VModuleConfiguration:
		out[path] = []any{[]map[string]any{{"filePattern": "x", "verbosity": 7}}}
		return
	}
	switch of.Kind() {
	case reflect.Struct:
		for i := range of.NumField() {
			f := of.Field(i)
			name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
			switch {
			case f.Type == reflect.TypeFor[metav1.TypeMeta]():
			case name == "" && (f.Anonymous || strings.Contains(options, "inline")):
				fieldValues(t, path, f.Type, out)
			default:
				require.NotEmpty(t, name, "%s of %s", f.Name, of)
				fieldValues(t, strings.TrimPrefix(path+"."+name, "."), f.Type, out)
			}
		}
	case reflect.Pointer:
		fieldValues(t, path, of.Elem(), out)
		// An explicit zero is not the default.
		out[path] = append(out[path], reflect.Zero(of.Elem()).Interface())
	case reflect.String:
		out[path] = []any{"x"}
	case reflect.Bool:
		out[path] = []any{true}
	case reflect.Int32, reflect.Uint32, reflect.Float32:
		out[path] = []any{7}
	case reflect.Slice:
		require.Equal(t, reflect.String, of.Elem().Kind(), path)
		out[path] = []any{[]string{"10.0.0.0/8"}}
	default:
		t.Fatalf("%s is a %s: what values can it have?", path, of)
	}
}

// document returns kube-proxy's file for a mode, with one field.
func document(t *testing.T, mode, path string, value any) string {
	t.Helper()
	content := map[string]any{}
	if mode != "" {
		content["mode"] = mode
	}
	at, names := content, strings.Split(path, ".")
	for _, name := range names[:len(names)-1] {
		inner := map[string]any{}
		at[name], at = inner, inner
	}
	at[names[len(names)-1]] = value
	b, err := yaml.Marshal(content)
	require.NoError(t, err)
	return proxy + string(b)
}

// TestNoFieldIsLostSilently asserts that a value other than the default, for any field of
// kube-proxy's configuration, is either carried over or reported.
func TestNoFieldIsLostSilently(t *testing.T) {
	fields := map[string][]any{}
	fieldValues(t, "", reflect.TypeFor[v1alpha1.KubeProxyConfiguration](), fields)
	require.Greater(t, len(fields), 50)
	for path := range given {
		require.Contains(t, fields, path, "kube-proxy has it no more")
	}
	settings := func(m *Migrated) map[string]string {
		out := map[string]string{}
		for _, s := range configfile.Settings(m.Agent) {
			out[s.Field] = strings.Join(s.Values, ",")
		}
		return out
	}
	for _, mode := range []string{"", modeIPTables, modeIPVS, modeNFTables} {
		text := proxy
		if mode != "" {
			text += "mode: " + mode
		}
		base, err := Migrate([]byte(text))
		require.NoError(t, err)
		for _, path := range slices.Sorted(maps.Keys(fields)) {
			for _, value := range fields[path] {
				if value == kubeProxyDefaults[path] || path == "mode" && (value == mode || mode != "") {
					continue
				}
				if d, ok := value.(metav1.Duration); ok {
					value = d.Duration.String()
				}
				t.Run(fmt.Sprintf("%s/%s=%v", mode, path, value), func(t *testing.T) {
					m, err := Migrate([]byte(document(t, mode, path, value)))
					require.NoError(t, err)
					named := func(before, after []Note) bool {
						return slices.ContainsFunc(after, func(n Note) bool {
							return !slices.Contains(before, n) && (n.Field == path || strings.HasPrefix(n.Field, path+".") ||
								n.Field == "logging.options" && strings.HasPrefix(path, n.Field+"."))
						})
					}
					if named(base.Lost, m.Lost) || named(base.Notes, m.Notes) {
						return
					}
					want := strings.Trim(fmt.Sprint(value), "[]")
					if gates, ok := value.(map[string]bool); ok {
						want = fmt.Sprint(slices.Collect(maps.Values(gates))[0])
					}
					before, carried := settings(base), false
					for field, text := range settings(m) {
						carried = carried || before[field] != text && text == want
					}
					require.True(t, carried, "neither carried over nor named: %v, lost %v, notes %v", settings(m), m.Lost, m.Notes)
				})
			}
		}
	}
}

// TestDefaultsAreNotLost asserts that a file that contains every field with its empty value loses
// nothing.
func TestDefaultsAreNotLost(t *testing.T) {
	for _, mode := range []v1alpha1.ProxyMode{"", modeIPTables, modeIPVS, modeNFTables} {
		c := v1alpha1.KubeProxyConfiguration{TypeMeta: metav1.TypeMeta{APIVersion: kubeProxyAPIVersion, Kind: kubeProxyKind}, Mode: mode}
		b, err := yaml.Marshal(c)
		require.NoError(t, err)
		require.Contains(t, string(b), "enableDSR: false")
		m, err := Migrate(b)
		require.NoError(t, err)
		require.Empty(t, m.Lost, "%s", b)
		c.Logging.FlushFrequency.Duration.Duration = time.Second
		b, err = yaml.Marshal(c)
		require.NoError(t, err)
		m, err = Migrate(b)
		require.NoError(t, err)
		require.Len(t, m.Lost, 1)
	}
}
