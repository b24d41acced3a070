// Command vulncheck runs govulncheck on this module. It fails if the module, including its tests,
// calls a function that is known to be vulnerable, unless the file of exceptions says why the call
// is harmless. If a module is vulnerable but none of its vulnerable functions is called, vulncheck
// only lists it.
//
// It also fails if nothing could be checked, or if an exception is no longer needed.
//
// Usage: vulncheck [-db URL] <path of govulncheck> <file of exceptions> [package pattern]...
package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

func main() {
	db := flag.String("db", "", "URL of the vulnerability database; empty means govulncheck's default")
	flag.Parse()
	if flag.NArg() < 2 {
		flag.Usage()
		os.Exit(2)
	}
	if err := run(context.Background(), os.Stdout, *db, flag.Arg(0), flag.Arg(1), flag.Args()[2:]); err != nil {
		fmt.Fprintln(os.Stderr, "vulncheck:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, w io.Writer, db, govulncheck, exceptionsFile string, patterns []string) error {
	accepted, err := loadExceptions(exceptionsFile)
	if err != nil {
		return err
	}
	args := []string{"-format=json", "-test"}
	if db != "" {
		args = append(args, "-db="+db)
	}
	cmd := exec.CommandContext(ctx, govulncheck, append(args, patterns...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("nothing was checked: %w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	found, database, err := parse(out)
	if err != nil {
		return fmt.Errorf("nothing was checked: %w", err)
	}
	fmt.Fprintf(w, "checked against %s\n", database)
	return found.report(w, accepted)
}

// loadExceptions returns the vulnerabilities that are accepted although a vulnerable function is
// called, by ID in the Go vulnerability database, such as GO-2026-1234. The value says why the
// vulnerability is harmless here.
func loadExceptions(file string) (map[string]string, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var reasons map[string]string
	if err := yaml.Unmarshal(text, &reasons); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	for id, reason := range reasons {
		if strings.TrimSpace(reason) == "" {
			return nil, fmt.Errorf("%s: exception %s has no reason", file, id)
		}
	}
	return reasons, nil
}

// message is a message in govulncheck's output. One of the fields is set in each message; others of
// govulncheck's are ignored.
type message struct {
	Config *struct {
		DB       string `json:"db"`
		Modified string `json:"db_last_modified"`
	} `json:"config"`
	OSV *struct {
		ID      string `json:"id"`
		Summary string `json:"summary"`
	} `json:"osv"`
	Finding *struct {
		OSV          string  `json:"osv"`
		FixedVersion string  `json:"fixed_version"`
		Trace        []frame `json:"trace"`
	} `json:"finding"`
}

// frame is a call in a trace. The first frame of a trace is the vulnerable function.
type frame struct {
	Module   string `json:"module"`
	Version  string `json:"version"`
	Package  string `json:"package"`
	Receiver string `json:"receiver"`
	Function string `json:"function"`
}

func (f frame) String() string {
	if f.Receiver == "" {
		return f.Package + "." + f.Function
	}
	return fmt.Sprintf("%s.(%s).%s", f.Package, f.Receiver, f.Function)
}

// findings are the known vulnerabilities of modules in use, by ID.
type findings map[string]*vulnerability

// vulnerability is a known vulnerability of a module in use.
type vulnerability struct {
	summary, module, fixed string
	// calls describes each call of a vulnerable function and where it comes from; empty if none is
	// called.
	calls []string
}

// parse parses govulncheck's output. It also returns the URL and the date of the vulnerability
// database.
func parse(out []byte) (found findings, database string, err error) {
	found = make(findings)
	summaries := make(map[string]string)
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var m message
		if err := decoder.Decode(&m); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, "", fmt.Errorf("decode govulncheck's output: %w", err)
		}
		if m.Config != nil {
			database = m.Config.DB + " of " + m.Config.Modified
		}
		if m.OSV != nil {
			summaries[m.OSV.ID] = m.OSV.Summary
		}
		if m.Finding == nil || len(m.Finding.Trace) == 0 {
			continue
		}
		v := cmp.Or(found[m.Finding.OSV], &vulnerability{})
		found[m.Finding.OSV] = v
		trace := m.Finding.Trace
		v.module, v.fixed = trace[0].Module+" "+trace[0].Version, cmp.Or(m.Finding.FixedVersion, "no version yet")
		if trace[0].Function != "" {
			v.calls = append(v.calls, fmt.Sprintf("%s, from %s", trace[0], trace[len(trace)-1]))
		}
	}
	if database == "" {
		return nil, "", errors.New("govulncheck wrote no configuration")
	}
	for id, v := range found {
		v.summary = summaries[id]
	}
	return found, database, nil
}

// report writes the findings to w. It returns an error if something must be done.
func (found findings) report(w io.Writer, accepted map[string]string) error {
	var open []string
	for _, id := range slices.Sorted(maps.Keys(found)) {
		v := found[id]
		state := "not called"
		switch {
		case len(v.calls) > 0 && accepted[id] != "":
			state = "accepted: " + accepted[id]
		case len(v.calls) > 0:
			state = "CALLED"
			open = append(open, id)
		}
		fmt.Fprintf(w, "%s: %s: %s\n\t%s, fixed in %s\n", id, state, v.summary, v.module, v.fixed)
		for _, call := range v.calls {
			fmt.Fprintf(w, "\t%s\n", call)
		}
	}
	var errs []error
	if len(open) > 0 {
		errs = append(errs, fmt.Errorf("vulnerable functions are called (%s): update the modules, or add an exception with a reason",
			strings.Join(open, ", ")))
	}
	for _, id := range slices.Sorted(maps.Keys(accepted)) {
		if v := found[id]; v == nil || len(v.calls) == 0 {
			errs = append(errs, fmt.Errorf("the exception %s is not needed: remove it", id))
		}
	}
	return errors.Join(errs...)
}
