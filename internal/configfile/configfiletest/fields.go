// Package configfiletest asserts that a configuration file has what its program has.
package configfiletest

import (
	"maps"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
)

// EveryFlagHasAField asserts that each flag, except for some, has a field in the struct T. It also
// asserts that each field belongs to a flag, and that a page names all flags and fields. It returns
// the fields by their flags.
func EveryFlagHasAField[T any](t *testing.T, fs *pflag.FlagSet, page string, except ...string) map[string]string {
	t.Helper()
	fields := make(map[string]string)
	collect(t, "", reflect.TypeFor[T](), fields)
	all := maps.Clone(fields)
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	without := make(map[string]bool)
	for _, flag := range except {
		require.NotNil(t, fs.Lookup(flag), flag)
		without[flag] = true
	}
	fs.VisitAll(func(f *pflag.Flag) {
		require.Contains(t, string(text), "`--"+f.Name+"`")
		field := fields[f.Name]
		delete(fields, f.Name)
		if without[f.Name] {
			require.Empty(t, field, f.Name)
			return
		}
		require.NotEmpty(t, field, f.Name)
		require.Contains(t, string(text), "`"+field+"`")
	})
	require.Empty(t, fields, "fields without a flag")
	return all
}

// collect collects the fields of a struct by their flags.
func collect(t *testing.T, prefix string, of reflect.Type, fields map[string]string) {
	t.Helper()
	for i := range of.NumField() {
		f := of.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch flag := f.Tag.Get("flag"); {
		case f.Anonymous:
		case flag != "":
			require.Empty(t, fields[flag], "given twice")
			fields[flag] = prefix + name
		default:
			collect(t, prefix+name+".", f.Type.Elem(), fields)
		}
	}
}
