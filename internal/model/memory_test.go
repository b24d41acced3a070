// This test proves that the memory of objects counts every field of them, also those that are added
// later. The oracle is a walk by reflection.
package model

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// fill sets every field, list and pointer below v, and strings to 1,000 bytes.
func fill(v reflect.Value) {
	switch {
	case !v.CanSet(): // private fields have no lists of their own but leaves
	case v.Type() == reflect.TypeFor[netip.Addr](), v.Type() == reflect.TypeFor[netip.Prefix]():
	case v.Kind() == reflect.String:
		v.SetString(strings.Repeat("x", 1000))
	case v.Kind() == reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case v.Kind() == reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 3, 5))
		for i := range v.Len() {
			fill(v.Index(i))
		}
	case v.Kind() == reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i))
		}
	}
}

// heldBy returns the bytes that a value refers to, without those of the value itself.
func heldBy(v reflect.Value) (size int) {
	switch v.Kind() {
	case reflect.String:
		return v.Len()
	case reflect.Pointer:
		if !v.IsNil() && v.Type() != reflect.TypeFor[netip.Addr]() {
			return int(v.Type().Elem().Size()) + heldBy(v.Elem())
		}
	case reflect.Slice:
		size = v.Cap() * int(v.Type().Elem().Size())
		for i := range v.Len() {
			size += heldBy(v.Index(i))
		}
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[netip.Addr]() || v.Type() == reflect.TypeFor[netip.Prefix]() {
			return 0
		}
		for i := range v.NumField() {
			size += heldBy(v.Field(i))
		}
	}
	return size
}

func TestMemoryCountsEveryField(t *testing.T) {
	for _, o := range []interface{ Memory() int }{&Service{}, &Slice{}, &SliceDelta{}, &Update{}} {
		fill(reflect.ValueOf(o).Elem())
		if s, ok := o.(*Slice); ok {
			s.leaves = make([]hash, 100)
		}
		held := heldBy(reflect.ValueOf(&o).Elem().Elem())
		require.Greater(t, held, 2000, "%T", o)
		require.GreaterOrEqual(t, o.Memory(), held, "%T", o)
		require.Less(t, o.Memory(), held*3/2, "%T", o)
	}
}
