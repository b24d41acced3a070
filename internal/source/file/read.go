package file

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/source"
)

// Read reads the objects of an API server, as JSON values one after the other or as YAML documents,
// and gives them to the sink once. It uses the ServiceProxyName and the Log of the options. It
// returns an error if an object cannot be read.
//
// Of JSON, it holds the text of one object at a time, also if all are in one list. So it needs
// memory for what nodes use of the objects, and not for what else is in them. YAML is held whole.
func Read(in io.Reader, name string, o Options, sink source.Sink) error {
	log := cmp.Or(o.Log, slog.Default())
	p := parser{source.NewConverter(o.ServiceProxyName), log, true}
	b := bufio.NewReader(in)
	f := &file{}
	if first, err := b.Peek(1); err == nil && first[0] == '{' {
		objects := &fileParser{parser: p, name: name, file: f}
		err := eachObject(json.NewDecoder(b), func(raw []byte, implied metav1.TypeMeta) {
			objects.item(value{raw: raw, document: &document{text: raw, line: 1}}, implied)
		})
		if errors.Is(err, io.EOF) { // within an object
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return fmt.Errorf("read objects from %s: %w", name, err)
		}
	} else {
		text, err := io.ReadAll(b)
		if err != nil {
			return fmt.Errorf("read objects from %s: %w", name, err)
		}
		f = p.parse(name, text, nil)
	}
	if f.unread != "" {
		return fmt.Errorf("read objects: %s", f.unread)
	}
	s := &Source{files: files{known: map[string]*file{name: f}}, mirrors: mirrors{}}
	now := s.assemble()
	s.fill(source.WithServiceCIDRs(sink, source.NewSkips(log, prometheus.NewRegistry())), now)
	return nil
}

// eachObject calls each with the text of every object. It does so for the items of a list, with the
// type that the list implies, if that comes before the items. The text is valid during the call.
func eachObject(d *json.Decoder, each func(raw []byte, implied metav1.TypeMeta)) error {
	var raw json.RawMessage
	item := func(implied metav1.TypeMeta) error {
		err := d.Decode(&raw)
		if err == nil {
			each(raw, implied)
		}
		return err
	}
	for {
		begin, err := d.Token()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case begin != json.Delim('{'):
			return errors.New(noObject)
		}
		fields := map[string]json.RawMessage{}
		isList := false
		for d.More() {
			name, err := d.Token()
			if err != nil {
				return err
			}
			if name != "items" {
				var field json.RawMessage
				if err := d.Decode(&field); err != nil {
					return err
				}
				fields[fmt.Sprint(name)] = field
				continue
			}
			isList = true
			if err := eachItem(d, impliedBy(fields), item); err != nil {
				return err
			}
		}
		if _, err := d.Token(); err != nil { // the end of the object
			return err
		}
		if isList {
			continue
		}
		whole, err := json.Marshal(fields)
		if err != nil {
			return err
		}
		each(whole, metav1.TypeMeta{})
	}
}

// eachItem calls item at each item of a list, which may be null.
func eachItem(d *json.Decoder, implied metav1.TypeMeta, item func(metav1.TypeMeta) error) error {
	begin, err := d.Token()
	switch {
	case err != nil || begin == nil:
		return err
	case begin != json.Delim('['):
		return errors.New("the items of a list are no array")
	}
	for d.More() {
		if err := item(implied); err != nil {
			return err
		}
	}
	_, err = d.Token()
	return err
}

// impliedBy returns the type of a list's items that name none, by the list's own fields.
func impliedBy(fields map[string]json.RawMessage) (t metav1.TypeMeta) {
	text := func(name string) (s string) {
		if json.Unmarshal(fields[name], &s) != nil {
			return ""
		}
		return s
	}
	if kind, isList := strings.CutSuffix(text("kind"), "List"); isList && kind != "" {
		t.APIVersion, t.Kind = text("apiVersion"), kind
	}
	return t
}
