package upstream

import (
	_ "embed"
	"encoding/xml"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/slicecast/slicecast/internal/testenv/repository"
)

// The outcomes of cases.
const (
	passed  = "passed"
	failed  = "failed"
	skipped = "skipped"
)

// Result is the outcome of a case.
type Result struct {
	// Name is upstream's full name of the case.
	Name string
	// Outcome is passed, failed or skipped. A case that is skipped has decided so itself.
	Outcome string
	// Message is why a case skipped itself, or the end of what a failed case says.
	Message string
}

// Failed reports whether the case failed.
func (r Result) Failed() bool { return r.Outcome == failed }

// rule says something about the cases whose names match.
type rule struct {
	// Match is a regular expression.
	Match string `json:"match"`
	// Reason is a sentence.
	Reason string `json:"reason"`
}

// cases is the content of cases.yaml.
var cases = mustParse(casesFile)

//go:embed cases.yaml
var casesFile []byte

type caseRules struct {
	// CannotRun are the cases that are left out.
	CannotRun []rule `json:"cannotRun"`
	// Explained are the cases that do not pass with every proxy.
	Explained []rule `json:"explained"`
}

// mustParse parses cases.yaml. The tests of this package check what is in it.
func mustParse(content []byte) (parsed caseRules) {
	if err := yaml.UnmarshalStrict(content, &parsed); err != nil {
		panic(fmt.Sprintf("cases.yaml: %v", err))
	}
	return parsed
}

// notChosen is the message of cases that were not chosen to run.
const notChosen = "skipped"

// readReport returns the outcomes of a JUnit report of upstream's tests. It has all of their cases,
// also those that were not chosen.
func readReport(path string) ([]Result, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var report struct {
		Suites []struct {
			Cases []struct {
				Name    string `xml:"name,attr"`
				Skipped *struct {
					Message string `xml:"message,attr"`
				} `xml:"skipped"`
				Failure *struct {
					Text string `xml:",chardata"`
				} `xml:"failure"`
				Error *struct {
					Text string `xml:",chardata"`
				} `xml:"error"`
			} `xml:"testcase"`
		} `xml:"testsuite"`
	}
	if err := xml.Unmarshal(content, &report); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	var results []Result
	for _, suite := range report.Suites {
		for _, c := range suite.Cases {
			result := Result{Name: strings.TrimPrefix(c.Name, "[It] "), Outcome: passed}
			switch {
			case c.Failure != nil:
				result.Outcome, result.Message = failed, strings.TrimSpace(c.Failure.Text)
			case c.Error != nil:
				result.Outcome, result.Message = failed, strings.TrimSpace(c.Error.Text)
			case c.Skipped != nil:
				result.Outcome, result.Message = skipped, strings.TrimPrefix(c.Skipped.Message, "skipped - ")
			}
			// A suite that fails outside of its cases must not go unnoticed.
			isCase := strings.HasPrefix(c.Name, "[It] ")
			if isCase && !(result.Outcome == skipped && result.Message == notChosen) || result.Failed() {
				results = append(results, result)
			}
		}
	}
	return results, nil
}

// Summary returns the numbers of outcomes, and the names of the cases that failed.
func Summary(results []Result) string {
	counts := map[string]int{}
	var failures strings.Builder
	for _, result := range results {
		counts[result.Outcome]++
		if result.Failed() {
			fmt.Fprintf(&failures, "\n  failed: %s", result.Name)
		}
	}
	return fmt.Sprintf("%d passed, %d failed, %d skipped themselves%s",
		counts[passed], counts[failed], counts[skipped], failures.String())
}

// outcomes are results by the names of the cases.
type outcomes map[string]Result

// add adds the results of a run. A case that skips itself, as some do in a cluster with few nodes,
// keeps its outcome of another cluster.
func (o outcomes) add(results []Result) {
	for _, result := range results {
		_, known := o[result.Name]
		// Others are not cases, but steps before or after all cases.
		if strings.HasPrefix(result.Name, "[sig-network]") && !(known && result.Outcome == skipped) {
			o[result.Name] = result
		}
	}
}

// Record writes results to the folder results, for a combination of proxy and programmer such as
// slicecast-nftables. Earlier results of other cases stay.
func Record(combination string, results []Result) error {
	root, err := repository.Root()
	if err != nil {
		return err
	}
	path := filepath.Join(root, resultsDir, combination+resultsSuffix)
	all, err := readResults(path)
	if err != nil {
		return err
	}
	all.add(results)
	var content strings.Builder
	for _, name := range slices.Sorted(maps.Keys(all)) {
		fmt.Fprintf(&content, "%s\t%s", all[name].Outcome, name)
		if all[name].Outcome == skipped {
			fmt.Fprintf(&content, "\t%s", all[name].Message)
		}
		content.WriteString("\n")
	}
	return os.WriteFile(path, []byte(content.String()), 0o644)
}

// readResults returns the content of a file of the folder results: lines with an outcome, a name
// and the message of a case that has skipped itself. It is empty if there is no file.
func readResults(path string) (outcomes, error) {
	all := outcomes{}
	content, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return all, nil
	}
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(content)) {
		outcome, rest, ok := strings.Cut(strings.TrimSpace(line), "\t")
		if !ok {
			return nil, fmt.Errorf("%s: line %q has no tab: record the outcomes again", path, line)
		}
		name, message, _ := strings.Cut(rest, "\t")
		all[name] = Result{Name: name, Outcome: outcome, Message: message}
	}
	return all, nil
}
