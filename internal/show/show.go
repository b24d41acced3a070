// Package show contains what the status commands have in common. They request a report once or
// every two seconds, and print it as tables for people or as JSON for programs.
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
	"unicode/utf16"
	"unicode/utf8"

	"github.com/spf13/pflag"
	"golang.org/x/term"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"sigs.k8s.io/yaml"
)

// interval is the time between two requests with --watch.
const interval = 2 * time.Second

// askTimeout bounds one request of the commands that ask one process, including the connection.
const askTimeout = 10 * time.Second

// These are the output formats.
const table, wide, jsonFormat, yamlFormat = "table", "wide", "json", "yaml"

// Options are the flags about output, and what the command supports of them.
type Options struct {
	// Output is an output format.
	Output string
	Watch  bool

	// Wide means that the report has more columns in the format wide.
	Wide bool
	// Once means that the command has no --watch.
	Once bool
	// AskTimeout bounds one request; 0 means 10 s.
	AskTimeout time.Duration
}

// Formats returns the output formats of the command.
func (o *Options) Formats() []string {
	if o.Wide {
		return []string{table, wide, jsonFormat, yamlFormat}
	}
	return []string{table, jsonFormat, yamlFormat}
}

// formats names the output formats in a sentence.
func (o *Options) formats() string {
	all := o.Formats()
	return strings.Join(all[:len(all)-1], ", ") + " or " + all[len(all)-1]
}

// AddFlags adds the flags, with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.StringVarP(&o.Output, "output", "o", table, "Output format: "+o.formats()+".")
	if !o.Once {
		fs.BoolVarP(&o.Watch, "watch", "w", false, "Show the state every 2 s until interrupted.")
	}
}

// Validate returns an error if a flag is wrong.
func (o *Options) Validate() error {
	if !slices.Contains(o.Formats(), o.Output) {
		return fmt.Errorf("--output is %q: use %s", o.Output, o.formats())
	}
	return nil
}

// Dial returns a connection to the process whose status is requested. If that process was away, the
// connection is made again soon after it is back, which --watch needs.
func Dial(target string, options ...grpc.DialOption) (*grpc.ClientConn, error) {
	retry := backoff.DefaultConfig
	retry.MaxDelay = interval
	return grpc.NewClient(target, append(options,
		grpc.WithNoProxy(), grpc.WithConnectParams(grpc.ConnectParams{Backoff: retry}))...)
}

// Report is what a status command prints.
type Report interface {
	// Fields returns the fields of the JSON object that represents the report.
	Fields() []Field
	// Print prints the report for people.
	Print(out *Page)
}

// Field is a message, a list of messages, or any other value, in a JSON object.
type Field struct {
	Name string
	// Message is the value. If it is nil, Value is the value and, if that is nil, too, List.
	Message proto.Message
	Value   any
	List    []proto.Message
}

// Message is a message in a value that is encoded as JSON. Its fields that are zero are included.
type Message struct{ proto.Message }

// MarshalJSON implements json.Marshaler.
func (m Message) MarshalJSON() ([]byte, error) {
	return protojson.MarshalOptions{EmitDefaultValues: true}.Marshal(m.Message)
}

// Run requests the report and prints it. With Watch, it repeats that until ctx ends, and then
// returns nil. If the first request fails, Run returns the error. Later errors are printed instead
// of the report, because the process that is asked may come back.
func (o *Options) Run(ctx context.Context, out io.Writer, ask func(context.Context) (Report, error)) error {
	for first := true; ; first = false {
		text, err := o.Render(ctx, ask)
		switch {
		case ctx.Err() != nil && o.Watch:
			return nil
		case err != nil && first:
			return err
		case err != nil:
			text = fmt.Appendf(nil, "%s: %s\n", time.Now().Format(time.TimeOnly), Printable(err.Error()))
		}
		if o.Watch {
			columns, lines := terminal(out) // may have another size than before
			text = frame(text, columns, lines, first)
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

// Render requests the report and returns it in the output format.
func (o *Options) Render(ctx context.Context, ask func(context.Context) (Report, error)) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(o.AskTimeout, askTimeout))
	defer cancel()
	r, err := ask(ctx)
	if err != nil {
		return nil, plain(err)
	}
	switch o.Output {
	case jsonFormat:
		return JSON(r)
	case yamlFormat:
		text, err := encode(r.Fields())
		if err != nil {
			return nil, err
		}
		if hides(text) { // JSON is YAML, too, and a YAML encoder would not escape all of these characters
			return escaped(text, true), nil
		}
		return yaml.JSONToYAML(text)
	}
	p := &Page{Wide: o.Output == wide}
	r.Print(p)
	p.end()
	return p.text.Bytes(), p.err
}

// plain returns an error without gRPC's prefix, which people do not need.
func plain(err error) error {
	if s, ok := status.FromError(err); ok && s.Code() != codes.Unknown {
		return errors.New(s.Message())
	}
	return err
}

// terminal returns the size of the terminal that out is, or 0 if it is not one.
func terminal(out io.Writer) (columns, lines int) {
	f, ok := out.(*os.File)
	if !ok {
		return 0, 0
	}
	columns, lines, err := term.GetSize(int(f.Fd()))
	if err != nil {
		return 0, 0
	}
	return max(columns, 1), max(lines, 1)
}

// frame returns one frame of --watch. On a terminal it replaces the previous frame, and what does
// not fit is cut off: lines, and ends of lines.
func frame(text []byte, columns, lines int, first bool) []byte {
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
	for i, line := range all {
		all[i] = cut(line, columns)
	}
	return []byte(home + strings.Join(all, "\n") + "\n")
}

// cut returns as much of a line as fits into so many columns. A character that is not ASCII may
// have two.
func cut(line string, columns int) string {
	used := 0
	for i, r := range line {
		if used++; r >= utf8.RuneSelf {
			used++
		}
		if used > columns {
			return line[:i]
		}
	}
	return line
}

// JSON returns a report as one JSON object.
func JSON(r Report) ([]byte, error) {
	text, err := encode(r.Fields())
	return escaped(text, false), err
}

// encode returns one JSON object. It contains fields that are zero, so that programs need not know
// which fields are omitted.
func encode(fields []Field) ([]byte, error) {
	var parts [][]byte
	for _, f := range fields {
		value := f.Value
		switch {
		case f.Message != nil:
			value = Message{f.Message}
		case value == nil:
			list := make([]Message, 0, len(f.List)) // an empty list is not null
			for _, m := range f.List {
				list = append(list, Message{m})
			}
			value = list
		}
		text, err := json.Marshal(value)
		if err != nil {
			return nil, fmt.Errorf("JSON of %s: %w", f.Name, err)
		}
		parts = append(parts, fmt.Appendf(nil, "%q:%s", f.Name, text))
	}
	var out bytes.Buffer
	if err := json.Indent(&out, fmt.Appendf(nil, "{%s}", bytes.Join(parts, []byte(","))), "", "  "); err != nil {
		return nil, fmt.Errorf("JSON: %w", err)
	}
	out.WriteByte('\n')
	return out.Bytes(), nil
}

// hides reports whether JSON has characters that Printable replaces. They can only be in strings.
func hides(text []byte) bool {
	return bytes.ContainsFunc(text, func(r rune) bool { return isHidden(r) && r != '\n' })
}

// escaped returns JSON in which these characters are escaped, in the way of JSON or YAML.
func escaped(text []byte, yaml bool) []byte {
	if !hides(text) {
		return text
	}
	var out []byte
	for _, r := range string(text) {
		switch {
		case !isHidden(r) || r == '\n':
			out = utf8.AppendRune(out, r)
		case r > 0xffff && yaml:
			out = fmt.Appendf(out, `\U%08x`, r)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			out = fmt.Appendf(out, `\u%04x\u%04x`, high, low)
		default:
			out = fmt.Appendf(out, `\u%04x`, r)
		}
	}
	return out
}

// Page is a text that consists of tables.
type Page struct {
	// Wide means that tables have more columns.
	Wide bool

	text bytes.Buffer
	tabs *tabwriter.Writer
	err  error
}

// Title ends the previous table and begins a new one, with a heading line.
func (p *Page) Title(format string, args ...any) {
	p.end()
	if p.text.Len() > 0 {
		p.text.WriteByte('\n')
	}
	if format != "" {
		p.text.WriteString(Printable(fmt.Sprintf(format, args...)) + "\n")
	}
}

// Row adds a row to the table. Empty cells become dashes.
func (p *Page) Row(cells ...string) {
	if p.tabs == nil {
		p.tabs = tabwriter.NewWriter(&p.text, 0, 8, 2, ' ', 0)
	}
	for i, c := range cells {
		cells[i] = cmp.Or(Printable(c), "-")
	}
	_, err := io.WriteString(p.tabs, strings.Join(cells, "\t")+"\n")
	p.err = errors.Join(p.err, err)
}

// Printable replaces by blanks the characters that control a terminal, change the direction of what
// follows, or are invisible. Names that clients choose must not break or rearrange a table.
func Printable(s string) string {
	return strings.Map(func(r rune) rune {
		if isHidden(r) {
			return ' '
		}
		return r
	}, s)
}

// isHidden reports whether a character is not shown, but may change what is.
func isHidden(r rune) bool { return unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp) }

func (p *Page) end() {
	if p.tabs != nil {
		p.err = errors.Join(p.err, p.tabs.Flush())
		p.tabs = nil
	}
}

// Age formats a duration for people, with at least three digits: 812µs, 12.3ms, 4.57s, 3m12s,
// 5d3h2m1s.
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

// Bytes formats a number of bytes in powers of 1000: 812 B, 12.3 KB, 4.57 MB.
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

// Hash returns the first 16 hexadecimal digits of a version or digest, which are enough to
// distinguish it from others by eye. It returns "-" if b is empty.
func Hash(b []byte) string { return cmp.Or(hex.EncodeToString(b[:min(len(b), 8)]), "-") }
