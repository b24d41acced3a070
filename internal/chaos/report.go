package chaos

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"
)

// Report is what became of a run. Times are in seconds.
type Report struct {
	Proxy      string  `json:"proxy"`
	Programmer string  `json:"programmer"`
	Seed       uint64  `json:"seed"`
	Duration   float64 `json:"duration"` // of the plan
	Took       float64 `json:"took"`     // of the traffic, with all waits for convergence
	Changes    int     `json:"changes"`  // that the churn has made
	// Baseline is the time before the first fault, Quiet that between a convergence and the next
	// fault, and Calm the end, when nothing changes.
	Baseline Window        `json:"baseline"`
	Steps    []*StepResult `json:"steps"`
	Quiet    Window        `json:"quiet"`
	Calm     Window        `json:"calm"`
	// Converged is the time after all faults and changes until all nodes had converged.
	Converged float64 `json:"converged"`
	// Failures says what should not have happened.
	Failures []string `json:"failures,omitempty"`
}

// Window is a time of traffic.
type Window struct {
	Counts Counts `json:"counts"`
	// Errors are the first errors of requests.
	Errors []string `json:"errors,omitempty"`
}

// StepResult is what a fault did. Requests count from its begin until the nodes have converged.
type StepResult struct {
	Fault   string  `json:"fault"`
	Hit     string  `json:"hit,omitempty"`     // what it hit
	At      float64 `json:"at"`                // since the begin of the plan
	Skipped bool    `json:"skipped,omitempty"` // there is nothing that it could hit
	Window
	// Sliced, Reached and Verified are times since the end of the fault: until a new Service had
	// endpoints, until all nodes reached it, and until all kernels did what all objects say.
	Sliced   float64 `json:"sliced,omitempty"`
	Reached  float64 `json:"reached,omitempty"`
	Verified float64 `json:"verified,omitempty"`
	// Unconverged is the reason if the nodes did not converge within the limit.
	Unconverged string `json:"unconverged,omitempty"`
}

func newReport(o Options) *Report {
	return &Report{Proxy: string(o.Proxy), Programmer: o.Programmer, Seed: o.Plan.Seed, Duration: seconds(o.Plan.Duration)}
}

func seconds(d time.Duration) float64 { return d.Round(10 * time.Millisecond).Seconds() }

func (s *StepResult) set(took convergence) {
	s.Sliced, s.Reached, s.Verified = seconds(took.Sliced), seconds(took.Reached), seconds(took.Verified)
}

// line returns a line of progress, with the counts so far.
func (s *StepResult) line(counts Counts) string {
	if s.Skipped {
		return s.Fault + ": nothing to hit"
	}
	return fmt.Sprintf("%s on %s: %d requests, %d lost, %d misrouted, %d connections broken; a new Service was reached after %.2f s, %.2f s of them for its slices; all verified after %.2f s",
		s.Fault, s.Hit, counts.Requests, counts.Lost(), counts.Misrouted, counts.Broken, s.Reached, s.Sliced, s.Verified)
}

func (r *Report) fail(format string, args ...any) {
	r.Failures = append(r.Failures, fmt.Sprintf(format, args...))
}

// finish judges the windows without faults. Nothing may be misrouted once the nodes have converged,
// and nothing may be lost at the end.
func (r *Report) finish(took time.Duration) {
	r.Took = seconds(took)
	if n := r.Baseline.Counts.Misrouted + r.Quiet.Counts.Misrouted; n > 0 {
		r.fail("%d requests were misrouted while no fault lasted and the nodes had converged", n)
	}
	if c := r.Calm.Counts; c.Misrouted+c.Lost()+c.Broken > 0 || c.Requests == 0 {
		r.fail("at the end, of %d requests %d were lost and %d misrouted, and %d connections broke: %q",
			c.Requests, c.Lost(), c.Misrouted, c.Broken, r.Calm.Errors)
	}
}

// Sum returns the counts of everything.
func (r *Report) Sum() Counts {
	sum := r.Baseline.Counts.Plus(r.Quiet.Counts).Plus(r.Calm.Counts)
	for _, s := range r.Steps {
		sum = sum.Plus(s.Counts)
	}
	return sum
}

// Text returns the report for people.
func (r *Report) Text() string {
	var out strings.Builder
	fmt.Fprintf(&out, "%s (%s), seed %d, %s: %d faults, %d changes\n\n", r.Proxy, r.Programmer, r.Seed,
		time.Duration(r.Took*float64(time.Second)).Round(time.Second), len(r.Steps), r.Changes)
	var table strings.Builder
	table.WriteString("\tHIT\tREQUESTS\tLOST\tMISROUTED\tBROKEN\tREACHED\tVERIFIED\n")
	line := func(name, hit string, c Counts, times string) {
		fmt.Fprintf(&table, "%s\t%s\t%d\t%d\t%d\t%d\t%s\n", name, hit, c.Requests, c.Lost(), c.Misrouted, c.Broken, times)
	}
	line("baseline", "", r.Baseline.Counts, "\t")
	for _, s := range r.Steps {
		times := fmt.Sprintf("%.2f s\t%.2f s", s.Reached, s.Verified)
		switch {
		case s.Skipped:
			times = "\tnothing to hit"
		case s.Unconverged != "":
			times = "\tnot converged"
		}
		line(s.Fault, s.Hit, s.Counts, times)
	}
	line("between faults", "", r.Quiet.Counts, "\t")
	line("the end", "", r.Calm.Counts, fmt.Sprintf("\t%.2f s", r.Converged))
	line("all", "", r.Sum(), "\t")
	// Memory accepts everything.
	w := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
	_, _ = io.WriteString(w, table.String())
	_ = w.Flush()
	for _, failure := range r.Failures {
		fmt.Fprintf(&out, "\nFAILED: %s\n", failure)
	}
	return out.String()
}

// Write writes the report to a file.
func (r *Report) Write(path string) error {
	content, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(content, '\n'), 0o644)
}

// LoadReport reads a report from a file.
func LoadReport(path string) (*Report, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	r := &Report{}
	if err := json.Unmarshal(content, r); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return r, nil
}
