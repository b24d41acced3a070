package report

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
)

// JSONSchema is the JSON Schema of reports, as it is published: made of the types in this package.
//
//go:embed schema.json
var JSONSchema []byte

// maxReport is the most that is read of a report; one of an hour with ten repeats is a tenth of it.
const maxReport = 256 << 20

// WriteJSON writes the report for machines.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(r)
}

// Read reads a report for machines. One of another schema, older or newer, is refused by name.
func Read(r io.Reader) (*Report, error) {
	content, err := io.ReadAll(io.LimitReader(r, maxReport+1))
	if err != nil {
		return nil, err
	}
	if len(content) > maxReport {
		return nil, fmt.Errorf("not a report: it has more than %d bytes", maxReport)
	}
	var named struct {
		Schema string `json:"schema"`
	}
	if err := json.Unmarshal(content, &named); err != nil {
		return nil, fmt.Errorf("not a report: %w", err)
	}
	switch named.Schema {
	case Schema:
	case "":
		return nil, fmt.Errorf("not a report: it names no schema, where a report names %q", Schema)
	default:
		return nil, fmt.Errorf("its schema is %q, and this load tester reads %q only: use the release that wrote it, or run the test again",
			named.Schema, Schema)
	}
	var out Report
	if err := json.Unmarshal(content, &out); err != nil {
		return nil, fmt.Errorf("not a report: %w", err)
	}
	return &out, nil
}
