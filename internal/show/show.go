// Package show is what the status commands have in common: they ask for a report once or every two seconds, and print it as
// tables for people or as JSON for programs.
package show

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// interval is how often --watch asks.
const interval = 2 * time.Second

// askTimeout bounds one asking, connecting included.
const askTimeout = 10 * time.Second

// Options are the flags about output.
type Options struct {
	// Output is "table" or "json".
	Output string
	Watch  bool
}

// AddFlags adds the flags, with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.StringVarP(&o.Output, "output", "o", "table", "how to print: table or json")
	fs.BoolVarP(&o.Watch, "watch", "w", false, "print again every 2 s, until interrupted")
}

// Validate says what is wrong with the flags.
func (o *Options) Validate() error {
	if o.Output != "table" && o.Output != "json" {
		return fmt.Errorf("--output is %q: use table or json", o.Output)
	}
	return nil
}

// Dial connects to what is to be asked. With --watch it is found again soon after it was away.
func Dial(target string, options ...grpc.DialOption) (*grpc.ClientConn, error) {
	retry := backoff.DefaultConfig
	retry.MaxDelay = interval
	return grpc.NewClient(target, append(options, grpc.WithNoProxy(), grpc.WithConnectParams(grpc.ConnectParams{Backoff: retry}))...)
}

// Report is what is printed.
type Report interface {
	// Fields are the report as JSON: one object with these fields.
	Fields() []Field
	// Print prints it for people.
	Print(out *Page)
}

// Field is a message, or a list of them, in a JSON object.
type Field struct {
	Name string
	// Message is the value. If it is nil, List is.
	Message proto.Message
	List    []proto.Message
}

// Run asks for the report and prints it; with Watch again and again, until the context ends. If the first asking fails,
// that is the error; later ones are printed in the report's place, as what is asked may be on its way back.
func (o *Options) Run(ctx context.Context, out io.Writer, ask func(context.Context) (Report, error)) error {
	screen := terminal(out)
	for first := true; ; first = false {
		text, err := o.render(ctx, ask)
		switch {
		case ctx.Err() != nil && o.Watch:
			return nil
		case err != nil && first:
			return err
		case err != nil:
			text = fmt.Appendf(nil, "%s: %v\n", time.Now().Format(time.TimeOnly), err)
		}
		if o.Watch {
			text = frame(text, screen, first)
		}
		if _, err := out.Write(text); err != nil {
			return fmt.Errorf("print: %w", err)
		}
		if !o.Watch {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(interval):
		}
	}
}

func (o *Options) render(ctx context.Context, ask func(context.Context) (Report, error)) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	r, err := ask(ctx)
	if err != nil {
		return nil, plain(err)
	}
	if o.Output == "json" {
		return encode(r.Fields())
	}
	p := &Page{}
	r.Print(p)
	p.end()
	return p.text.Bytes(), p.err
}

// plain gives an error without gRPC's prefix, which repeats what people don't need.
func plain(err error) error {
	if s, ok := status.FromError(err); ok && s.Code() != codes.Unknown {
		return errors.New(s.Message())
	}
	return err
}

// terminal gives the number of lines of the terminal that out is; 0: it is none.
func terminal(out io.Writer) int {
	f, ok := out.(*os.File)
	if !ok {
		return 0
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0
	}
	return max(int(size.Row), 1)
}

// frame makes one picture of --watch: on a terminal it replaces the one before, and what does not fit is cut off.
func frame(text []byte, lines int, first bool) []byte {
	if lines == 0 {
		if !first {
			text = append([]byte("\n"), text...)
		}
		return text
	}
	const home = "\x1b[H\x1b[J"
	all := strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")
	if len(all) >= lines {
		keep := max(lines-2, 0)
		all = append(slices.Clip(all[:keep]), fmt.Sprintf("… and %d more lines", len(all)-keep))
	}
	return []byte(home + strings.Join(all, "\n") + "\n")
}

// encode makes one JSON object. Fields at their zero value are in it, so that programs need not know what is left out.
func encode(fields []Field) ([]byte, error) {
	marshal := protojson.MarshalOptions{EmitDefaultValues: true}
	var b bytes.Buffer
	b.WriteByte('{')
	for i, f := range fields {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "%q:", f.Name)
		if f.Message != nil {
			m, err := marshal.Marshal(f.Message)
			if err != nil {
				return nil, fmt.Errorf("JSON of %s: %w", f.Name, err)
			}
			b.Write(m)
			continue
		}
		b.WriteByte('[')
		for i, m := range f.List {
			if i > 0 {
				b.WriteByte(',')
			}
			e, err := marshal.Marshal(m)
			if err != nil {
				return nil, fmt.Errorf("JSON of %s: %w", f.Name, err)
			}
			b.Write(e)
		}
		b.WriteByte(']')
	}
	b.WriteByte('}')
	var out bytes.Buffer
	if err := json.Indent(&out, b.Bytes(), "", "  "); err != nil { // which also undoes protojson's random spaces
		return nil, fmt.Errorf("JSON: %w", err)
	}
	out.WriteByte('\n')
	return out.Bytes(), nil
}

// Page is a text of tables.
type Page struct {
	text bytes.Buffer
	tabs *tabwriter.Writer
	err  error
}

// Title ends the table before and begins a new one, with a line of its own above it.
func (p *Page) Title(format string, args ...any) {
	p.end()
	if p.text.Len() > 0 {
		p.text.WriteByte('\n')
	}
	if format != "" {
		p.text.WriteString(printable(fmt.Sprintf(format, args...)) + "\n")
	}
}

// Row adds a row to the table. Empty cells become dashes.
func (p *Page) Row(cells ...string) {
	if p.tabs == nil {
		p.tabs = tabwriter.NewWriter(&p.text, 0, 8, 2, ' ', 0)
	}
	for i, c := range cells {
		cells[i] = cmp.Or(printable(c), "-")
	}
	_, err := io.WriteString(p.tabs, strings.Join(cells, "\t")+"\n")
	p.err = errors.Join(p.err, err)
}

// printable makes blanks of control characters: what clients say of themselves must not break a table, or a terminal.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, s)
}

func (p *Page) end() {
	if p.tabs != nil {
		p.err = errors.Join(p.err, p.tabs.Flush())
		p.tabs = nil
	}
}

// Age prints a duration so that it can be read, with three digits at least: 812µs, 12.3ms, 4.57s, 3m12s, 5d3h2m1s.
func Age(d time.Duration) string {
	abs := d.Abs()
	switch {
	case abs < time.Millisecond:
		return d.Round(time.Microsecond).String()
	case abs < time.Second:
		return d.Round(100 * time.Microsecond).String()
	case abs < time.Minute:
		return d.Round(10 * time.Millisecond).String()
	case abs < 24*time.Hour:
		return d.Round(time.Second).String()
	}
	d = d.Round(time.Second)
	return fmt.Sprintf("%dd%v", d/(24*time.Hour), d%(24*time.Hour))
}

// Bytes prints a number of bytes: 812 B, 12.3 KB, 4.57 MB, in powers of 1000.
func Bytes(n uint64) string {
	if n < 1000 {
		return fmt.Sprintf("%d B", n)
	}
	value, unit := float64(n), ""
	for _, unit = range []string{"KB", "MB", "GB", "TB", "PB", "EB"} {
		if value /= 1000; value < 999.5 {
			break
		}
	}
	return fmt.Sprintf("%.3g %s", value, unit)
}

// Hash returns the first 16 hexadecimal digits of a version or digest: enough to tell it from others by eye. "-" stands for none.
func Hash(b []byte) string { return cmp.Or(hex.EncodeToString(b[:min(len(b), 8)]), "-") }
