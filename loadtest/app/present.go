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

// The values of --output.
const (
	outputText = "text"
	outputJSON = "json"
)

// What the command exits with.
const (
	exitFailed = 1
	exitUsage  = 2
	exitMissed = 3
)

// exitCodes explains them in the help.
const exitCodes = `
Exit codes: 0 all is well; 1 the run failed, or a node did not end with the true state; 2 the command line cannot be meant;
3 the run is good and an objective (--require) was missed, or compare found something worse.`

// errMissed is what errors about objectives wrap.
var errMissed = errors.New("objective missed")

// usageError is an error that is in the command line.
type usageError struct{ error }

// Unwrap gives the error itself.
func (u usageError) Unwrap() error { return u.error }

// SignalContext gives a context that ends with the first SIGINT or SIGTERM. A second SIGINT ends the process at once. A second SIGTERM does
// not: a comparison's runs get one when the comparison is killed, and the kernel may send it for several of its threads.
func SignalContext() (ctx context.Context, stop context.CancelFunc) {
	signal.Notify(make(chan os.Signal, 1), syscall.SIGTERM)
	return daemon.SignalContext(context.Background())
}

// Execute runs the command and gives what to exit with. It says on errOut what went wrong.
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

// Presentation is how a report is shown, and what is required of it.
type Presentation struct {
	// Output is the form of what goes to standard output.
	Output string
	// HTML names a file for a page; empty: none.
	HTML string
	// Require are objectives.
	Require []string
}

// AddFlags adds the flags, with their defaults.
func (p *Presentation) AddFlags(fs *pflag.FlagSet) {
	fs.StringVarP(&p.Output, "output", "o", outputText, "form of what is printed: text or json")
	fs.StringVar(&p.HTML, "html", "", "also write a page with charts to this file, which needs nothing else")
	fs.StringArrayVar(&p.Require, "require", nil, "an objective, such as p99<250ms, that every repeat has to keep: "+report.ObjectiveGrammar+
		". Reports name the metrics. May be given several times")
}

// Validate finds what is wrong with the options; before a run, which is long.
func (p *Presentation) Validate() error {
	var errs []error
	if p.Output != outputText && p.Output != outputJSON {
		errs = append(errs, fmt.Errorf("--output is %q: use text or json", p.Output))
	}
	if p.HTML != "" {
		if s, err := os.Stat(filepath.Dir(p.HTML)); err != nil || !s.IsDir() {
			errs = append(errs, fmt.Errorf("--html is %q: there is no such directory", p.HTML))
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

// outcome is the error of a run that was presented: a failure of its own, whatever is required of it.
func outcome(failed, presented error) error {
	if failed != nil && errors.Is(presented, errMissed) {
		return failed
	}
	return errors.Join(failed, presented)
}

// Present prints a report, writes its page, and judges it. What became of objectives goes to errOut; the error wraps
// errMissed if one was missed.
func (p *Presentation) Present(r *report.Report, out, errOut io.Writer) error {
	write := r.WriteText
	if p.Output == outputJSON {
		write = r.WriteJSON
	}
	if err := errors.Join(write(out), p.writePage(report.DefaultTolerance, r)); err != nil {
		return err
	}
	return p.judge(r, errOut)
}

// judge holds a report against the objectives. What became of them goes to errOut; the error wraps errMissed if one was missed.
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

// writePage writes the page of reports, if one is wanted. The tolerance is that of comparisons.
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
