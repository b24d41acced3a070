// These tests prove what status commands print as a table and as JSON, how they watch, and that
// they return the errors of the server and of the output.
package show

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"sigs.k8s.io/yaml"

	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// report is a report with a list of keys.
type report struct{ keys []*pb.ObjectKey }

func (r report) Fields() []Field {
	f := Field{Name: "keys"}
	for _, k := range r.keys {
		f.List = append(f.List, k)
	}
	return []Field{{Name: "first", Message: r.keys[0]}, f, {Name: "none"}}
}

func (r report) Print(p *Page) {
	p.Row("alone", "here")
	p.Title("All %s", "keys")
	p.Row("NAMESPACE", "NAME")
	for _, k := range r.keys {
		p.Row(k.GetNamespace(), k.GetName())
	}
	p.Title("")
	p.Row("end")
}

var keys = report{[]*pb.ObjectKey{{Namespace: "default", Name: "web"}, {Name: "evil\x1b[2J\nname\t"}}}

func TestTables(t *testing.T) {
	var out bytes.Buffer
	o := Options{Output: "table"}
	require.NoError(t, o.Run(t.Context(), &out, func(context.Context) (Report, error) { return keys, nil }))
	require.Equal(t, `
alone  here

All keys
NAMESPACE  NAME
default    web
-          evil [2J name 

end
`, "\n"+out.String())
}

func TestJSON(t *testing.T) {
	var out bytes.Buffer
	o := Options{Output: "json"}
	require.NoError(t, o.Run(t.Context(), &out, func(context.Context) (Report, error) { return keys, nil }))
	require.Contains(t, out.String(), `{
  "first": {
    "kind": "OBJECT_KIND_UNSPECIFIED",
    "namespace": "default",
    "name": "web"
  },
  "keys": [
    {`)
	var got map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(out.Bytes(), &got))
	require.JSONEq(t, "[]", string(got["none"]))
}

func TestYAML(t *testing.T) {
	var out bytes.Buffer
	o := Options{Output: "yaml"}
	require.NoError(t, o.Run(t.Context(), &out, func(context.Context) (Report, error) { return values{}, nil }))
	require.Equal(t, `
value:
  key:
    kind: OBJECT_KIND_UNSPECIFIED
    name: web
    namespace: default
  pod: server-1
`, "\n"+out.String())
}

// values is a report of a value that contains a message. It has a column only if there is room.
type values struct{}

func (values) Fields() []Field {
	return []Field{{Name: "value", Value: map[string]any{"pod": "server-1", "key": Message{keys.keys[0]}}}}
}

func (values) Print(p *Page) {
	cells := []string{"server-1"}
	if p.Wide {
		cells = append(cells, "10.0.0.1")
	}
	p.Row(cells...)
}

func TestWide(t *testing.T) {
	for output, want := range map[string]string{"table": "server-1\n", "wide": "server-1  10.0.0.1\n"} {
		var out bytes.Buffer
		o := Options{Output: output, Wide: true}
		require.NoError(t, o.Run(t.Context(), &out, func(context.Context) (Report, error) { return values{}, nil }))
		require.Equal(t, want, out.String())
	}
}

func TestJSONErrors(t *testing.T) {
	bad := []proto.Message{&pb.ObjectKey{Name: "\xff"}}
	for _, f := range []Field{{Name: "x", Message: bad[0]}, {Name: "x", List: bad}} {
		_, err := encode([]Field{f})
		require.ErrorContains(t, err, "JSON of x")
	}
}

func TestFlags(t *testing.T) {
	var o Options
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	o.AddFlags(fs)
	require.NoError(t, o.Validate())
	require.NoError(t, fs.Parse([]string{"-o", "wide", "-w"}))
	require.True(t, o.Watch)
	require.ErrorContains(t, o.Validate(), "use table, json or yaml")
	o.Wide = true
	require.NoError(t, o.Validate())
}

func TestRunReturnsTheFirstError(t *testing.T) {
	for _, watch := range []bool{false, true} {
		o := Options{Output: "table", Watch: watch}
		err := o.Run(t.Context(), &bytes.Buffer{}, func(context.Context) (Report, error) {
			return nil, status.Error(codes.NotFound, "there is none")
		})
		require.EqualError(t, err, "there is none")
	}
}

func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var out bytes.Buffer
		o := Options{Output: "table", Watch: true}
		asked := 0
		begin := time.Now()
		require.NoError(t, o.Run(ctx, &out, func(ctx context.Context) (Report, error) {
			asked++
			require.Equal(t, time.Duration(asked-1)*interval, time.Since(begin))
			switch asked {
			case 2:
				return nil, errors.New("the server restarts")
			case 4:
				cancel()
				return nil, ctx.Err()
			}
			return keys, nil
		}))
		require.Equal(t, 2, strings.Count(out.String(), "\nAll keys\n"))
		require.Contains(t, out.String(), ": the server restarts\n\nalone")
		require.NotContains(t, out.String(), "\x1b[H", "no terminal, no escapes")
	})
}

type broken struct{}

func (broken) Write([]byte) (int, error) { return 0, errors.New("pipe closed") }

func TestPrintErrors(t *testing.T) {
	o := Options{Output: "table"}
	err := o.Run(t.Context(), broken{}, func(context.Context) (Report, error) { return keys, nil })
	require.EqualError(t, err, "print: pipe closed")
}

func TestFramesFitTheTerminal(t *testing.T) {
	text := []byte("1\n2\n3\n4\n")
	require.Equal(t, "\x1b[H\x1b[J1\n2\n3\n4\n", string(frame(text, 80, 5, false)))
	require.Equal(t, "\x1b[H\x1b[J1\n2\n… and 2 more lines\n", string(frame(text, 80, 4, false)))
	require.Equal(t, "\x1b[H\x1b[J… and 4 more lines\n", string(frame(text, 80, 1, true)))
	require.Equal(t, "\x1b[H\x1b[J12345\n123\n", string(frame([]byte("1234567\n123\n"), 5, 9, true)))
	require.Equal(t, "\x1b[H\x1b[J日本\n", string(frame([]byte("日本語\n"), 5, 9, true)))
}

// hidden are characters that nobody sees, and that change what a terminal shows.
const hidden = "\x1b\u009b\u202e\u2066\u200f\u061c\u200b\ufeff\u2028\U000e0041"

// TestNothingHidden checks that no format prints a character that could rearrange the output, and
// that JSON and YAML keep the text.
func TestNothingHidden(t *testing.T) {
	report := list{&pb.ObjectKey{Name: "a" + hidden + "z"}}
	for _, output := range []string{"table", "json", "yaml"} {
		o := Options{Output: output}
		text, err := o.Render(t.Context(), func(context.Context) (Report, error) { return report, nil })
		require.NoError(t, err)
		require.False(t, bytes.ContainsAny(text, hidden), "%s: %q", output, text)
		if output != "table" {
			var back struct{ Keys []struct{ Name string } }
			decode := map[string]func([]byte) error{
				"json": func(text []byte) error { return json.Unmarshal(text, &back) },
				"yaml": func(text []byte) error { return yaml.Unmarshal(text, &back) },
			}[output]
			require.NoError(t, decode(text))
			require.Equal(t, "a"+hidden+"z", back.Keys[0].Name)
		}
	}
	// Later errors of --watch are printed instead of the report.
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var out bytes.Buffer
		asked := 0
		require.NoError(t, (&Options{Output: "table", Watch: true}).Run(ctx, &out, func(context.Context) (Report, error) {
			switch asked++; asked {
			case 1:
				return report, nil
			case 3:
				cancel()
			}
			return nil, errors.New("a" + hidden + "z")
		}))
		require.False(t, strings.ContainsAny(out.String(), hidden), "%q", out.String())
		require.Contains(t, out.String(), ": a"+strings.Repeat(" ", utf8.RuneCountInString(hidden))+"z")
	})
}

// list is a report of keys.
type list []proto.Message

func (l list) Fields() []Field { return []Field{{Name: "keys", List: l}} }

func (l list) Print(p *Page) {
	for _, m := range l {
		p.Title("%s", m.(*pb.ObjectKey).GetName())
		p.Row(m.(*pb.ObjectKey).GetName())
	}
}

func TestAge(t *testing.T) {
	for want, d := range map[string]time.Duration{
		"0s": 0, "812µs": 811_999, "12.3ms": 12_345_678, "999.9ms": 999_912_345, "4.57s": 4_567_890_123, "3m12s": 192_100 * time.Millisecond,
		"23h59m59s": 24*time.Hour - time.Second, "1d0s": 24 * time.Hour, "5d3h2m1s": 123*time.Hour + 121*time.Second, "-1.5s": -1500 * time.Millisecond,
	} {
		require.Equal(t, want, Age(d))
	}
}

func TestBytes(t *testing.T) {
	for want, n := range map[string]uint64{
		"0 B": 0, "999 B": 999, "1 KB": 1000, "12.3 KB": 12_345, "1 MB": 999_600, "999 MB": 999_400_000, "18.4 EB": math.MaxUint64,
	} {
		require.Equal(t, want, Bytes(n))
	}
}
