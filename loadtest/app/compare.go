package app

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/slicecast/slicecast/loadtest/engine"
	"github.com/slicecast/slicecast/loadtest/report"
)

// endTime is how long an interrupted run may take to end what it started.
const endTime = 2 * time.Minute

type comparison struct {
	Presentation
	against   string
	tolerance float64
}

func newCompareCommand() *cobra.Command {
	o := &comparison{}
	c := &cobra.Command{
		Use:   "compare [BEFORE.json AFTER.json] [-- FLAGS OF run...]",
		Short: "Play the same scenario twice, and compare the costs",
		Long: `compare plays a scenario with a Kubernetes API server (slicecast-loadtest apiserver) and then with Slicecast (slicecast-loadtest
run) on this machine, and compares the costs metric by metric. The flags after -- apply to both, such as --scenario, --nodes and
--repeats. By default, Slicecast's servers generate their state. With --kube-apiserver=own after --, they watch an API server
instead. The latencies of both sides then include the way through an API server, so they compare like with like.

With --against, compare looks for regressions. It compares Slicecast with another release's slicecast-loadtest, which it runs
with the same flags, or with an earlier report. It plays the report's scenario again if there are no flags after --. With two
reports as arguments, it compares them and runs nothing.

--output, --html and --require belong to the comparison and go before --. --require judges the second side.

A verdict requires at least four repeats on both sides (--repeats=4). A metric is then better or worse if a Mann-Whitney U test
at the 5 % level says that the repeats differ, and if the medians differ by more than --tolerance. With fewer repeats, compare
prints the figures without a verdict.

  slicecast-loadtest compare -- --scenario=steady --nodes=1000 --repeats=4
  slicecast-loadtest compare -- --kube-apiserver=own --scenario=steady --nodes=1000 --repeats=4
  slicecast-loadtest compare --against=./slicecast-loadtest-v1.0.0 -- --scenario=steady --repeats=5
  slicecast-loadtest compare --html=page.html before.json after.json
` + exitCodes,
		RunE: func(c *cobra.Command, arguments []string) error {
			files, flags := arguments, []string(nil)
			if dash := c.ArgsLenAtDash(); dash >= 0 {
				files, flags = arguments[:dash], arguments[dash:]
			}
			if err := o.validate(files, flags); err != nil {
				return err
			}
			from, to, failed := o.sides(c.Context(), files, flags, c.ErrOrStderr())
			if from == nil || to == nil {
				return failed
			}
			return outcome(failed, o.present(report.Compare(from, to, o.tolerance), c.OutOrStdout(), c.ErrOrStderr()))
		},
	}
	o.AddFlags(c.Flags())
	c.Flags().StringVar(&o.against, "against", "", "a report (JSON) or another release's slicecast-loadtest to "+
		"compare with; by default, a Kubernetes API server")
	c.Flags().Float64Var(&o.tolerance, "tolerance", report.DefaultTolerance, "share by which medians may differ without a verdict, such as 0.05")
	c.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return fmt.Errorf("%w; flags of the runs go after --", err) })
	return c
}

func (o *comparison) validate(files, flags []string) error {
	err := o.Presentation.Validate()
	switch {
	case o.tolerance < 0:
		err = errors.Join(err, fmt.Errorf("--tolerance is %g: use 0 or more", o.tolerance))
	case len(files) != 0 && len(files) != 2:
		err = errors.Join(err, fmt.Errorf("there are %d arguments: use two reports, or no arguments and flags of run after --", len(files)))
	case len(files) == 2 && (o.against != "" || len(flags) > 0):
		err = errors.Join(err, errors.New("two reports are compared without a run: leave out --against and the flags after --"))
	}
	if err != nil {
		return usageError{err}
	}
	return nil
}

// ofComparison lists flags of run that belong to the comparison instead.
var ofComparison = []string{"output", "html", "require"}

// playable checks flags for a peer's command, before anything runs with them.
func playable(peer report.Peer, flags []string) error {
	o := &Options{Options: engine.Options{Peer: peer}}
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	fs.Usage = func() {}
	o.AddFlags(fs)
	if err := fs.Parse(flags); err != nil {
		return fmt.Errorf("after --: %w", err)
	}
	var errs []error
	for _, name := range ofComparison {
		if fs.Changed(name) {
			errs = append(errs, fmt.Errorf("--%s is after --: put it before --, because it belongs to the comparison", name))
		}
	}
	if fs.NArg() > 0 {
		errs = append(errs, fmt.Errorf("%q is after --: only flags are allowed there", fs.Arg(0)))
	}
	_, err := o.Options.Validate()
	return errors.Join(append(errs, err)...)
}

// sides reads or measures the two reports. Both may be set beside the error of a run.
func (o *comparison) sides(ctx context.Context, files, flags []string, errOut io.Writer) (from, to *report.Report, err error) {
	if len(files) == 2 {
		if from, err = readReport(files[0]); err != nil {
			return nil, nil, err
		}
		if to, err = readReport(files[1]); err != nil {
			return nil, nil, err
		}
		return from, to, nil
	}
	self, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	program, command, peers := o.against, "run", []report.Peer{report.Slicecast}
	switch {
	case o.against == "":
		program, command, peers = self, "apiserver", []report.Peer{report.KubeAPIServer, report.Slicecast}
	case isReport(o.against):
		if from, err = readReport(o.against); err != nil {
			return nil, nil, err
		}
		if len(flags) == 0 {
			var remove func() error
			if flags, remove, err = replay(from); err != nil {
				return nil, nil, err
			}
			defer func() { err = errors.Join(err, remove()) }()
		}
	default:
		if _, err := exec.LookPath(o.against); err != nil {
			return nil, nil, usageError{fmt.Errorf("--against=%s is neither a report nor a program (%w): use the "+
				"file of a report (JSON) or of a slicecast-loadtest",
				o.against, errors.Unwrap(err))}
		}
	}
	for _, peer := range peers {
		if err := playable(peer, flags); err != nil {
			return nil, nil, usageError{err}
		}
	}
	var failed error
	if from == nil {
		if from, failed = runChild(ctx, program, command, flags, errOut); from == nil {
			return nil, nil, failed
		}
	}
	to, err = runChild(ctx, self, "run", flags, errOut)
	return from, to, errors.Join(failed, err)
}

// replay returns flags that play the scenario of a report again with Slicecast, with the same
// number of repeats. The flags refer to a file with the scenario, which remove removes.
func replay(r *report.Report) (flags []string, remove func() error, err error) {
	switch {
	case r.Source == report.Generated:
	case r.Source == report.OwnAPIServer && r.Peer == report.KubeAPIServer:
		// Slicecast's servers then generate their state.
	case r.Source == report.OwnAPIServer:
		flags = append(flags, "--kube-apiserver="+engine.Own)
	case r.Source == "":
		return nil, nil, usageError{errors.New(
			"--against: the report does not say where its state came from: add flags after -- that say what to play")}
	default:
		return nil, nil, usageError{fmt.Errorf("--against: the report's state was %s, but the report does not say "+
			"how to reach that place: add flags after -- that say what to play",
			r.Source)}
	}
	dir, err := os.MkdirTemp("", "slicecast-loadtest-")
	if err != nil {
		return nil, nil, err
	}
	remove = func() error { return os.RemoveAll(dir) }
	parameters := maps.Clone(r.Scenario.Parameters)
	parameters["description"] = r.Scenario.Description
	content, err := json.Marshal(parameters) // JSON is valid YAML
	if err != nil {
		return nil, nil, errors.Join(err, remove())
	}
	file := filepath.Join(dir, filepath.Base(r.Scenario.Name)+".yaml")
	if err := os.WriteFile(file, content, 0o600); err != nil {
		return nil, nil, errors.Join(err, remove())
	}
	return append(flags, fmt.Sprintf("--repeats=%d", len(r.Repeats)), "--scenario="+file), remove, nil
}

// isReport reports whether a file is a report rather than a program, by its first byte.
func isReport(name string) bool {
	f, err := os.Open(name)
	if err != nil {
		return false
	}
	defer f.Close()
	first := make([]byte, 1)
	_, err = io.ReadFull(f, first)
	return err == nil && first[0] == '{'
}

// runChild plays a scenario with a load tester in a child process, so that neither side of a
// comparison has the other's garbage in memory. However this process ends, the child gets exactly
// one signal, so it can remove what it has created. There may be a report beside the error of a
// failed run.
func runChild(ctx context.Context, program, command string, flags []string, errOut io.Writer) (*report.Report, error) {
	arguments := append([]string{command, "--output=json"}, flags...)
	c := exec.CommandContext(ctx, program, arguments...)
	// The child has a process group of its own: a terminal sends ^C to the whole group of this
	// process. A second signal would end the child at once, before it removes what it has created.
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	c.Cancel = func() error { return c.Process.Signal(os.Interrupt) }
	c.WaitDelay = endTime
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, errOut
	// The kernel sends Pdeathsig when the thread that started the child ends, so that thread must
	// live until then.
	runtime.LockOSThread()
	ran := c.Run()
	runtime.UnlockOSThread()
	var exit *exec.ExitError
	switch {
	case out.Len() > 0:
	case ran == nil:
		return nil, fmt.Errorf("%s %s printed no report: use a slicecast-loadtest or a report", program, command)
	case !errors.As(ran, &exit): // the child did not start, or was interrupted
		return nil, fmt.Errorf("%s %s: %w", program, command, ran)
	case exit.ExitCode() == exitUsage:
		return nil, usageError{fmt.Errorf("%s %s: invalid flags after --; its output is above", program, command)}
	default:
		return nil, fmt.Errorf("%s %s: %w; its output is above", program, command, ran)
	}
	r, err := report.Read(&out)
	if err != nil {
		return nil, errors.Join(ran, fmt.Errorf("%s %s: %w", program, command, err))
	}
	if ran != nil {
		return r, fmt.Errorf("%s %s: %w; its output is above", program, command, ran)
	}
	return r, nil
}

// present prints a comparison, and judges its second side. The error wraps errMissed if an
// objective was missed or, unless the peers differ, if a metric is worse.
func (o *comparison) present(c *report.Comparison, out, errOut io.Writer) error {
	if err := errors.Join(printResult(out, o.Output, c), o.writePage(o.tolerance, c.From, c.To)); err != nil {
		return err
	}
	missed := o.judge(c.To, errOut)
	if !c.From.OK() || !c.To.OK() {
		return errors.New("a check of a run failed, so the comparison is meaningless")
	}
	if worse := c.Regressed(); len(worse) > 0 && c.From.Peer == c.To.Peer {
		missed = errors.Join(missed, fmt.Errorf("%w: %d metrics are worse, among them %s: %s",
			errMissed, len(worse), worse[0].Metric.Name, worse[0].Ratio()))
	}
	return missed
}
