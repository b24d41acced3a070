package configfile

import (
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Setting is a field that is given, as the values of its flag. There is one value, or any number
// for a flag that is a list.
type Setting struct {
	Field, Flag string
	Values      []string
}

// Settings returns the fields of a struct that are given, in the order of their declaration.
func Settings(of any) []Setting { return settings("", reflect.ValueOf(of).Elem()) }

func settings(prefix string, v reflect.Value) []Setting {
	var out []Setting
	for i := range v.NumField() {
		field, value := v.Type().Field(i), v.Field(i)
		if field.Anonymous || value.IsNil() {
			continue
		}
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		s := Setting{Field: prefix + name, Flag: field.Tag.Get("flag")}
		switch x := value.Interface().(type) {
		case []string:
			s.Values = x
		case *string:
			s.Values = []string{*x}
		case *bool:
			s.Values = []string{strconv.FormatBool(*x)}
		case *int32:
			s.Values = []string{strconv.Itoa(int(*x))}
		case *int64:
			s.Values = []string{strconv.FormatInt(*x, 10)}
		case *metav1.Duration:
			s.Values = []string{x.Duration.String()}
		default:
			out = append(out, settings(prefix+name+".", value.Elem())...)
			continue
		}
		out = append(out, s)
	}
	return out
}

// FromFlags sets the fields of a struct so that they have the same effect as the values of flags.
// Fields of flags that are neither given nor have a default stay nil.
func FromFlags(into any, fs *pflag.FlagSet) { fill(reflect.ValueOf(into).Elem(), fs) }

// fill sets the fields of a struct, and of the structs in it, from the values of their flags. It
// reports whether it has set any.
func fill(v reflect.Value, fs *pflag.FlagSet) (filled bool) {
	for i := range v.NumField() {
		field, value := v.Type().Field(i), v.Field(i)
		if field.Anonymous {
			continue
		}
		name := field.Tag.Get("flag")
		if name == "" {
			section := reflect.New(field.Type.Elem())
			if fill(section.Elem(), fs) {
				value.Set(section)
				filled = true
			}
			continue
		}
		if set(value, fs.Lookup(name)) {
			filled = true
		}
	}
	return filled
}

// set sets a field to the value of its flag, unless that is empty by default.
func set(field reflect.Value, flag *pflag.Flag) bool {
	text := flag.Value.String()
	list, isList := flag.Value.(pflag.SliceValue)
	if isList {
		text = strings.Join(list.GetSlice(), ",")
	}
	if text == "" && (flag.DefValue == "" || isList && flag.DefValue == "[]") {
		return false
	}
	switch to := field.Addr().Interface().(type) {
	case *[]string:
		*to = list.GetSlice()
	case **string:
		*to = &text
	case **bool:
		b := text == "true"
		*to = &b
	case **int32:
		n, _ := strconv.ParseInt(text, 10, 32) // the flag has printed it
		i := int32(n)
		*to = &i
	case **int64:
		n, _ := strconv.ParseInt(text, 10, 64) // the flag has printed it
		*to = &n
	case **metav1.Duration:
		d, _ := time.ParseDuration(text) // the flag has printed it
		*to = &metav1.Duration{Duration: d}
	}
	return true
}
