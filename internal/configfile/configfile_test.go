// These tests prove that exactly the fields in a configuration file set their flags, that the
// command line wins, and that an error names the field. The fuzz target proves that no content
// makes Parse fail in another way.
package configfile

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	kind = "TestConfiguration"
	head = "apiVersion: slicecast.io/v1beta1\nkind: " + kind + "\n"
)

// configuration has a field of each type.
type configuration struct {
	metav1.TypeMeta `json:",inline"`

	Name    *string  `json:"name,omitempty" flag:"name"`
	Peers   []string `json:"peers,omitempty" flag:"peers"`
	Keys    []string `json:"keys,omitempty" flag:"key"`
	Section *section `json:"section,omitempty"`
}

type section struct {
	Bit    *int32           `json:"bit,omitempty" flag:"bit"`
	Bytes  *int64           `json:"bytes,omitempty" flag:"bytes"`
	All    *bool            `json:"all,omitempty" flag:"all"`
	Period *metav1.Duration `json:"period,omitempty" flag:"period"`
}

// values are the flags of a configuration.
type values struct {
	name        string
	peers, keys []string
	bit         int
	bytes       int64
	all         bool
	period      time.Duration

	file  File
	flags *pflag.FlagSet
}

func parse(t *testing.T, args ...string) *values {
	t.Helper()
	v := &values{flags: pflag.NewFlagSet(t.Name(), pflag.ContinueOnError)}
	v.file.AddFlag(v.flags)
	v.flags.StringVar(&v.name, "name", "", "")
	v.flags.StringSliceVar(&v.peers, "peers", nil, "")
	v.flags.StringArrayVar(&v.keys, "key", nil, "")
	v.flags.IntVar(&v.bit, "bit", 14, "")
	v.flags.Int64Var(&v.bytes, "bytes", 0, "")
	v.flags.BoolVar(&v.all, "all", true, "")
	v.flags.DurationVar(&v.period, "period", time.Hour, "")
	require.NoError(t, v.flags.Parse(args))
	return v
}

func write(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file.yaml")
	require.NoError(t, os.WriteFile(path, []byte(head+content), 0o600))
	return path
}

func TestSettingsReturnsTheFieldsThatAreSet(t *testing.T) {
	var c configuration
	require.NoError(t, Parse([]byte(head+`
name: node-1
peers: [a:1, b:1]
keys: []
section: {bit: 0, bytes: 5000000000, all: false, period: 2s}
`), kind, &c))
	require.Equal(t, []Setting{
		{"name", "name", []string{"node-1"}},
		{"peers", "peers", []string{"a:1", "b:1"}},
		{"keys", "key", []string{}},
		{"section.bit", "bit", []string{"0"}},
		{"section.bytes", "bytes", []string{"5000000000"}},
		{"section.all", "all", []string{"false"}},
		{"section.period", "period", []string{"2s"}},
	}, Settings(&c))
	c = configuration{}
	require.NoError(t, Parse([]byte(head+"section: {}"), kind, &c))
	require.Empty(t, Settings(&c))
}

func TestFieldsSetFlagsUnlessTheCommandLineDoes(t *testing.T) {
	path := write(t, "name: a\npeers: [b:1]\nkeys: [x/y, z]\nsection: {bit: 3, bytes: 7, all: false, period: 2s}")
	v := parse(t, "--config="+path, "--name=mine", "--bit=4")
	require.NoError(t, v.file.Read(kind, &configuration{}, v.flags))
	require.Equal(t, "mine", v.name)
	require.Equal(t, 4, v.bit)
	require.Equal(t, []string{"b:1"}, v.peers)
	require.Equal(t, []string{"x/y", "z"}, v.keys)
	require.EqualValues(t, 7, v.bytes)
	require.False(t, v.all)
	require.Equal(t, 2*time.Second, v.period)
	require.True(t, v.file.Sets("peers"))
	require.False(t, v.file.Sets("name"))

	v = parse(t, "--name=mine", "--key=x", "--key=y")
	require.NoError(t, v.file.Read(kind, &configuration{}, v.flags), "there is no file")
	require.Equal(t, []string{"x", "y"}, v.keys)
	require.Equal(t, time.Hour, v.period)

	var effective configuration
	FromFlags(&effective, v.flags)
	require.Equal(t, []Setting{
		{"name", "name", []string{"mine"}},
		{"keys", "key", []string{"x", "y"}},
		{"section.bit", "bit", []string{"14"}},
		{"section.bytes", "bytes", []string{"0"}},
		{"section.all", "all", []string{"true"}},
		{"section.period", "period", []string{"1h0m0s"}},
	}, Settings(&effective))
}

func TestErrorsAreAboutTheFile(t *testing.T) {
	v := parse(t, "--config=/nowhere/file.yaml")
	require.ErrorContains(t, v.file.Read(kind, &configuration{}, v.flags), "--config: open /nowhere/file.yaml")
	for content, says := range map[string]string{
		"section: {Bit: 3}":         `unknown field "section.Bit"`,
		"section: {period: soon}":   "soon",
		`peers: ['"']`:              ": peers: ",
		"name: a\nname: b":          `"name" already set`,
		"section: {bytes: 1.5}":     "section.bytes",
		"section: {bit: 300000000}": "", // the flag has a larger type
	} {
		path := write(t, content)
		v := parse(t, "--config="+path)
		err := v.file.Read(kind, &configuration{}, v.flags)
		if says == "" {
			require.NoError(t, err)
			continue
		}
		require.ErrorContains(t, err, says)
		require.ErrorContains(t, err, "--config="+path)
	}

	path := write(t, "section: {bit: 32}")
	v = parse(t, "--config="+path, "--name=x")
	require.NoError(t, v.file.Read(kind, &configuration{}, v.flags))
	require.EqualError(t, v.file.Named(errors.New("--bit is 32: use 31 with --name")),
		"--config="+path+": section.bit is 32: use 31 with --name")
	require.EqualError(t, v.file.Named(errors.New("--name is x")), "--name is x", "the file is not to blame")
	require.NoError(t, v.file.Named(nil))
}

func TestOneDocumentWithSeparators(t *testing.T) {
	var c configuration
	require.NoError(t, Parse([]byte("# A file.\n---\n"+head+"name: a\n---\n# That is all.\n"), kind, &c))
	require.Equal(t, "a", *c.Name)
}

func TestErrorsNameTheField(t *testing.T) {
	for name, c := range map[string]struct{ content, says string }{
		"unknown":          {head + "section: {Bit: 3}", `unknown field "section.Bit"`},
		"unknown section":  {head + "nftables: {bit: 3}", `unknown field "nftables"`},
		"twice":            {head + "name: a\nname: b", `key "name" already set`},
		"wrong type":       {head + "section: {bit: many}", "section.bit"},
		"a text for many":  {head + "peers: a:1", "peers"},
		"no duration":      {head + "section: {period: 30}", "section.period: have number, want string: use quotes, and for a duration a unit, such as 30s"},
		"another kind":     {"apiVersion: slicecast.io/v1beta1\nkind: OtherConfiguration", "kind: TestConfiguration"},
		"an early version": {"apiVersion: slicecast.io/v1alpha1\nkind: TestConfiguration", "use apiVersion: slicecast.io/v1beta1"},
		"another version":  {"apiVersion: slicecast.io/v9\nkind: TestConfiguration", "apiVersion: slicecast.io/v1beta1"},
		"kube-proxy's":     {"apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration", "apiVersion: slicecast.io/v1beta1"},
		"empty":            {"", "apiVersion: slicecast.io/v1beta1"},
		"a list":           {"[1]", "the document is of type array: use an object with apiVersion"},
		"no YAML":          {"{", "yaml"},
		"two documents":    {head + "---\nname: b", "more than one YAML document"},
		"two, on a line":   {head + "--- {name: b}", "more than one YAML document"},
		"two, ended":       {head + "...\n# more\n--- # and\nname: b", "more than one YAML document"},
		"a second broken":  {head + "---\n{", "yaml"},
		"something larger": {strings.Repeat("#", maxFile+1), "check that it is the right file"},
	} {
		t.Run(name, func(t *testing.T) {
			require.ErrorContains(t, Parse([]byte(c.content), kind, &configuration{}), c.says)
		})
	}
}

// FuzzParse asserts that every content is either accepted or refused, and that what is accepted can
// be read as settings.
func FuzzParse(f *testing.F) {
	f.Add([]byte(head + "peers: [a:1]\nsection: {bit: 3}"))
	f.Add([]byte("{}"))
	f.Fuzz(func(t *testing.T, content []byte) {
		var c configuration
		if Parse(content, kind, &c) != nil {
			return
		}
		for _, s := range Settings(&c) {
			require.NotEmpty(t, s.Field)
			require.NotEmpty(t, s.Flag)
		}
	})
}
