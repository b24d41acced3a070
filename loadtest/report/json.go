package report

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
)

// JSONSchema is the published JSON Schema of reports. It is generated from the types of this
// package.
//
//go:embed schema.json
var JSONSchema []byte

// maxReport is the largest report that Read accepts, in bytes. A report of an hour with ten repeats
// has a tenth of this size.
const maxReport = 256 << 20

// WriteJSON writes a report, or any other value that the load tester prints for programs.
func WriteJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// Read reads a report from JSON. If the report has another schema, older or newer, the error names
// that schema.
func Read(r io.Reader) (*Report, error) {
	content, err := io.ReadAll(io.LimitReader(r, maxReport+1))
	if err != nil {
		return nil, err
	}
	if len(content) > maxReport {
		return nil, fmt.Errorf("not a report: larger than %d bytes", maxReport)
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
		return nil, fmt.Errorf("not a report: its schema is missing, expected %q", Schema)
	default:
		return nil, fmt.Errorf("schema is %q, but this load tester reads only %q: use the release that wrote the report, or run the test again",
			named.Schema, Schema)
	}
	var out Report
	if err := json.Unmarshal(content, &out); err != nil {
		return nil, fmt.Errorf("not a report: %w", err)
	}
	return &out, nil
}
