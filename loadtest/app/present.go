package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/report/page"
)

// Values of --output.
const (
	outputText = "text"
	outputJSON = "json"
)

// Exit codes of the command; 0 is success.
const (
	exitFailed = 1
	exitUsage  = 2
	exitMissed = 3
)

// exitCodes describes the exit codes in help texts.
const exitCodes = `
Exit codes: 0 success; 1 the run failed, or a node did not hold the true state at the end; 2 the command line is invalid;
3 the run succeeded, but an objective (--require) was missed, or compare found a regression.`

// errMissed is wrapped by errors about missed objectives and regressions.
var errMissed = errors.New("objective missed")

type usageError struct{ error }

// Unwrap returns the wrapped error.
func (u usageError) Unwrap() error { return u.error }

// SignalContext returns a context that ends with the first SIGINT or SIGTERM. A second SIGINT ends
// the process at once. A second SIGTERM does not: when a comparison is killed, the kernel sends
// SIGTERM to its runs, possibly once for each of several threads.
func SignalContext() (ctx context.Context, stop context.CancelFunc) {
	signal.Notify(make(chan os.Signal, 1), syscall.SIGTERM)
	return daemon.SignalContext(context.Background())
}

// Execute runs the command and returns its exit code. It writes errors to errOut.
func Execute(ctx context.Context, arguments []string, in io.Reader, out, errOut io.Writer) int {
	c := NewCommand()
	c.SetArgs(arguments)
	c.SetIn(in)
	c.SetOut(out)
	c.SetErr(errOut)
	understood, err := daemon.Execute(ctx, c)
	if err == nil {
		return 0
	}
	fmt.Fprintln(errOut, "slicecast-loadtest:", err)
	usage := usageError{}
	switch {
	case !understood || errors.As(err, &usage):
		return exitUsage
	case errors.Is(err, errMissed):
		return exitMissed
	}
	return exitFailed
}

// Presentation says how to present a report and which objectives it must keep.
type Presentation struct {
	// Output is the format of standard output.
	Output string
	// HTML is the file to write a page to. If it is empty, no page is written.
	HTML string
	// Require lists the objectives.
	Require []string
}

// AddFlags adds the flags, with their defaults.
func (p *Presentation) AddFlags(fs *pflag.FlagSet) {
	fs.StringVarP(&p.Output, "output", "o", outputText, "output format: text or json")
	fs.StringVar(&p.HTML, "html", "", "also write a self-contained HTML page with charts to this file")
	fs.StringArrayVar(&p.Require, "require", nil, "an objective that every repeat must keep, such as p99<250ms: "+report.ObjectiveGrammar+
		". Reports list the metrics. The flag may be repeated")
}

// Validate returns all errors in the options. Callers validate before a run, because runs are long.
func (p *Presentation) Validate() error {
	var errs []error
	if p.Output != outputText && p.Output != outputJSON {
		errs = append(errs, fmt.Errorf("--output is %q: use text or json", p.Output))
	}
	if p.HTML != "" {
		if s, err := os.Stat(filepath.Dir(p.HTML)); err != nil || !s.IsDir() {
			errs = append(errs, fmt.Errorf("--html is %q: its directory does not exist", p.HTML))
		}
	}
	for _, r := range p.Require {
		if _, err := report.ParseObjective(r); err != nil {
			errs = append(errs, fmt.Errorf("--require: %w", err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return usageError{err}
	}
	return nil
}

// outcome combines the errors of a run and of its presentation. If the run failed, missed
// objectives do not matter.
func outcome(failed, presented error) error {
	if failed != nil && errors.Is(presented, errMissed) {
		return failed
	}
	return errors.Join(failed, presented)
}

func printResult(out io.Writer, format string, result interface{ Text() string }) error {
	if format == outputJSON {
		return report.WriteJSON(out, result)
	}
	_, err := io.WriteString(out, result.Text())
	return err
}

// Present prints a report, writes its page, and judges it. The judgments go to errOut. The error
// wraps errMissed if an objective was missed.
func (p *Presentation) Present(r *report.Report, out, errOut io.Writer) error {
	if err := errors.Join(printResult(out, p.Output, r), p.writePage(report.DefaultTolerance, r)); err != nil {
		return err
	}
	return p.judge(r, errOut)
}

// judge checks a report against the objectives and prints the judgments to errOut. The error wraps
// errMissed if an objective was missed.
func (p *Presentation) judge(r *report.Report, errOut io.Writer) error {
	missed := 0
	for _, text := range p.Require {
		o, err := report.ParseObjective(text)
		if err != nil {
			return usageError{err}
		}
		kept, why := o.Judge(r)
		if !kept {
			missed++
		}
		fmt.Fprintln(errOut, "objective", why)
	}
	if missed > 0 {
		return fmt.Errorf("%w: %d of %d", errMissed, missed, len(p.Require))
	}
	return nil
}

// writePage writes the page of the reports if --html is set. The tolerance is that of comparisons.
func (p *Presentation) writePage(tolerance float64, reports ...*report.Report) error {
	if p.HTML == "" {
		return nil
	}
	f, err := os.Create(p.HTML)
	if err != nil {
		return fmt.Errorf("--html: %w", err)
	}
	if err := errors.Join(page.Write(f, tolerance, reports...), f.Close()); err != nil {
		return fmt.Errorf("--html: %w", err)
	}
	return nil
}
