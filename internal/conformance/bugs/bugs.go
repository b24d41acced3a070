// Package bugs has the table of what went wrong in kube-proxy and its kin in the last years, and
// where this repository tests that it does not happen here. What packets show is a conformance
// case, which a real kube-proxy has been held to as well; its outcomes are in the folder results.
// The table is bugs.yaml, and a section of docs/conformance.md shows it.
package bugs

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Bug is a row of the table.
type Bug struct {
	// Number is the issue or pull request, such as kubernetes/kubernetes#1. It is empty if there is
	// none.
	Number string
	// Area is the heading that the bug stands under.
	Area string
	// What says what went wrong, in a phrase.
	What string
	// Cases are the conformance cases of the bug.
	Cases []Case
	// Tests are other tests: a package and the name of a test or benchmark, such as
	// "agent/conntrack TestLastEndpoint", or a target of make, such as "make conntrack".
	Tests []string
	// Only names the programmers that the bug concerns, and the modes of kube-proxy; nil means all.
	Only []string
	// NotRun says why kube-proxy was not run. It is required unless there are cases.
	NotRun string `yaml:"notRun"`
	// Notes follow the words that a version of kube-proxy fails, by version.
	Notes map[string]string
	// Shared says why Slicecast does the same as kube-proxy. The cases and tests require just that.
	Shared string
	// Senseless says why the bug makes no sense here. Then there are neither cases nor tests.
	Senseless string
}

// Case is a conformance case, or some of its checks.
type Case struct {
	// Name is the name of its file without the extension.
	Name string
	// Checks is a regular expression for the descriptions of the bug's checks; empty means all.
	Checks string
}

// Versions are the versions of kube-proxy in the table, and Variants its modes, with the variants
// of iptables. The mode ipvs needs a virtual machine, in which a case takes minutes. So it is run
// only with the cases of bugs that concern no other mode.
var (
	Versions = []string{"1.36.3", "1.37.2"}
	Variants = []string{"nftables", "iptables-nft", "iptables-legacy", ipvs}
)

const ipvs = "ipvs"

// files are the table and the outcomes.
//
//go:embed bugs.yaml results
var files embed.FS

// Load reads the table.
func Load() ([]Bug, error) {
	text, err := files.ReadFile("bugs.yaml")
	if err != nil {
		return nil, err
	}
	var list []Bug
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	decoder.KnownFields(true)
	if err := decoder.Decode(&list); err != nil {
		return nil, fmt.Errorf("bugs.yaml: %w", err)
	}
	var errs []error
	for i := range list {
		if err := list[i].validate(); err != nil {
			errs = append(errs, fmt.Errorf("bugs.yaml: %s (%s): %w", list[i].Number, list[i].What, err))
		}
	}
	return list, errors.Join(errs...)
}

func (b *Bug) validate() error {
	tested := len(b.Cases)+len(b.Tests) > 0
	switch {
	case b.Area == "" || b.What == "":
		return errors.New("area or what is missing")
	case tested == (b.Senseless != ""):
		return errors.New("want either cases or tests, or the reason why it is senseless")
	case tested && (len(b.Cases) == 0) != (b.NotRun != ""):
		return errors.New("want either cases, or the reason why kube-proxy is not run")
	}
	for version := range b.Notes {
		if !slices.Contains(Versions, version) {
			return fmt.Errorf("notes: want a version of %s, not %s", Versions, version)
		}
	}
	for _, c := range b.Cases {
		if _, err := regexp.Compile(c.Checks); err != nil {
			return err
		}
	}
	return nil
}

// CaseNames returns the names of the cases that a variant of kube-proxy is run with, ascending.
func CaseNames(list []Bug, variant string) []string {
	var names []string
	for i := range list {
		if !slices.Contains(list[i].variants(), variant) {
			continue
		}
		for _, c := range list[i].Cases {
			names = append(names, c.Name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// Outcome is the outcome of one check of a case.
type Outcome struct {
	Case string
	// Digest identifies the content of the case's file when it was played; see [Digest].
	Digest string
	// Check describes the check: its step, if it is not at the beginning, and its name.
	Check  string
	Passed bool
}

// Digest returns the digest of a case's file.
func Digest(file string) (string, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:6]), nil
}

const (
	passed = "passed"
	failed = "failed"
)

// FileName returns the name of the file with the outcomes of a kube-proxy.
func FileName(version, variant string) string {
	return "kube-proxy-" + version + "-" + variant + ".tsv"
}

// Write writes the outcomes of a kube-proxy to a folder. Those that the folder has of other cases
// of the table stay.
func Write(dir, version, variant string, outcomes []Outcome) error {
	list, err := Load()
	if err != nil {
		return err
	}
	known := CaseNames(list, variant)
	path := filepath.Join(dir, FileName(version, variant))
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	before, err := parse(text)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	played := map[string]bool{}
	for _, o := range outcomes {
		played[o.Case] = true
	}
	all := append(slices.DeleteFunc(before, func(o Outcome) bool { return played[o.Case] || !slices.Contains(known, o.Case) }), outcomes...)
	slices.SortStableFunc(all, func(a, b Outcome) int { return cmp.Compare(a.Case, b.Case) })
	var out strings.Builder
	for i := range all {
		out.WriteString(all[i].line() + "\n")
	}
	return os.WriteFile(path, []byte(out.String()), 0o644)
}

// marker begins a line of [Print].
const marker = "kube-proxy's outcome"

// Print prints the outcomes of a kube-proxy, for [WritePrinted].
func Print(w io.Writer, version, variant string, outcomes []Outcome) error {
	var out strings.Builder
	for i := range outcomes {
		fmt.Fprintf(&out, "%s\t%s\t%s\t%s\n", marker, version, variant, outcomes[i].line())
	}
	_, err := io.WriteString(w, out.String())
	return err
}

// WritePrinted writes the outcomes of a variant that [Print] has printed, with other lines around
// them, to a folder. It is an error if there are none.
func WritePrinted(dir, variant, output string) error {
	var version string
	var lines []string
	for line := range strings.Lines(output) {
		fields := strings.SplitN(strings.TrimSuffix(line, "\n"), "\t", 4)
		if len(fields) == 4 && fields[0] == marker && fields[2] == variant {
			version, lines = fields[1], append(lines, fields[3])
		}
	}
	if lines == nil {
		return fmt.Errorf("the test of kube-proxy in variant %s has printed no outcomes", variant)
	}
	outcomes, err := parse([]byte(strings.Join(lines, "\n")))
	if err != nil {
		return err
	}
	return Write(dir, version, variant, outcomes)
}

// line returns the outcome as a line of a file, without its end.
func (o *Outcome) line() string {
	word := failed
	if o.Passed {
		word = passed
	}
	return strings.Join([]string{o.Case, o.Digest, word, o.Check}, "\t")
}

func parse(text []byte) ([]Outcome, error) {
	var list []Outcome
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		fields := strings.Split(lines.Text(), "\t")
		if len(fields) != 4 || fields[2] != passed && fields[2] != failed {
			return nil, fmt.Errorf("line %d is not the outcome of a check", len(list)+1)
		}
		list = append(list, Outcome{fields[0], fields[1], fields[3], fields[2] == passed})
	}
	return list, nil
}

// Results are the outcomes of each kube-proxy, by the names of files.
type Results map[string][]Outcome

// LoadResults reads the recorded outcomes.
func LoadResults() (Results, error) {
	results := Results{}
	for _, version := range Versions {
		for _, variant := range Variants {
			name := FileName(version, variant)
			text, err := files.ReadFile("results/" + name)
			if err != nil {
				return nil, fmt.Errorf("%w; record it with 'make conformance-record'", err)
			}
			if results[name], err = parse(text); err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	return results, nil
}

// of returns the outcomes of a bug's checks with a kube-proxy. It is an error if one of the bug's
// cases was not played.
func (r Results) of(b *Bug, version, variant string) ([]Outcome, error) {
	var found []Outcome
	for _, c := range b.Cases {
		before := len(found)
		for _, o := range r[FileName(version, variant)] {
			// A kube-proxy that stops has no outcome of the checks after that.
			if o.Case == c.Name && (o.Check == Stopped || regexp.MustCompile(c.Checks).MatchString(o.Check)) {
				found = append(found, o)
			}
		}
		if len(found) == before {
			return nil, fmt.Errorf("%s: kube-proxy %s, %s, has no outcome of case %s, checks %q: run 'make conformance-record'",
				cmp.Or(b.Number, b.What), version, variant, c.Name, c.Checks)
		}
	}
	return found, nil
}

// Stopped describes the check that kube-proxy programs the changes of a step. Its outcome is
// recorded only if kube-proxy does not.
const Stopped = "kube-proxy programs the case"

// modeOf returns the mode of a variant.
func modeOf(variant string) string {
	mode, _, _ := strings.Cut(variant, "-")
	return mode
}

// variants returns the variants of kube-proxy that are run with the bug's cases.
func (b *Bug) variants() []string {
	if slices.Equal(b.Only, []string{ipvs}) {
		return []string{ipvs}
	}
	return slices.DeleteFunc(slices.Clone(Variants), func(v string) bool {
		return v == ipvs || b.Only != nil && !slices.Contains(b.Only, modeOf(v))
	})
}

// fails returns the modes in which a kube-proxy fails a bug's checks.
func (r Results) fails(b *Bug, version string) ([]string, error) {
	modes := map[string]bool{}
	for _, variant := range b.variants() {
		outcomes, err := r.of(b, version, variant)
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(outcomes, func(o Outcome) bool { return !o.Passed }) {
			modes[modeOf(variant)] = true
		}
	}
	return slices.Sorted(maps.Keys(modes)), nil
}
