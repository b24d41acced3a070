package upstream

import (
	_ "embed"
	"encoding/xml"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
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

	pattern *regexp.Regexp
}

// cases is the content of cases.yaml.
var cases = mustParse(casesFile)

//go:embed cases.yaml
var casesFile []byte

type caseRules struct {
	// CannotRun are the cases that are left out.
	CannotRun []*rule `json:"cannotRun"`
	// Environment are the cases that fail or skip themselves with every proxy.
	Environment []*rule `json:"environment"`
}

func mustParse(content []byte) (parsed caseRules) {
	if err := yaml.UnmarshalStrict(content, &parsed); err != nil {
		panic(fmt.Sprintf("cases.yaml: %v", err))
	}
	for _, rules := range [][]*rule{parsed.CannotRun, parsed.Environment} {
		for _, r := range rules {
			r.pattern = regexp.MustCompile(r.Match)
		}
	}
	return parsed
}

// find returns the first rule that matches a name, or nil.
func find(rules []*rule, name string) *rule {
	for _, r := range rules {
		if r.pattern.MatchString(name) {
			return r
		}
	}
	return nil
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
	return fmt.Sprintf("%d passed, %d failed, %d skipped themselves%s", counts[passed], counts[failed], counts[skipped], failures.String())
}

// Record writes outcomes to the folder results, for a combination of proxy and programmer such as
// slicecast-nftables. Earlier outcomes of other cases stay.
func Record(combination string, results []Result) error {
	root, err := repository.Root()
	if err != nil {
		return err
	}
	path := filepath.Join(root, resultsDir, combination+".yaml")
	outcomes, err := readResults(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if outcomes == nil {
		outcomes = map[string]string{}
	}
	for _, result := range results {
		if !strings.HasPrefix(result.Name, "[sig-network]") {
			continue // not a case, but a step before or after all cases
		}
		outcomes[result.Name] = result.Outcome
		if result.Outcome == skipped {
			outcomes[result.Name] += ": " + result.Message
		}
	}
	content, err := yaml.Marshal(outcomes)
	if err != nil {
		return err
	}
	return os.WriteFile(path, content, 0o644)
}

// readResults returns the outcomes of a file of the folder results, by the names of the cases.
func readResults(path string) (outcomes map[string]string, err error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if err := yaml.UnmarshalStrict(content, &outcomes); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return outcomes, nil
}
