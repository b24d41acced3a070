package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"

	"github.com/spf13/pflag"

	"github.com/slicecast/slicecast/loadtest/engine"
	"github.com/slicecast/slicecast/loadtest/progress"
	"github.com/slicecast/slicecast/loadtest/report"
)

// The values of --output.
const (
	outputText = "text"
	outputJSON = "json"
)

// Options are the flags of the commands that run a scenario.
type Options struct {
	engine.Options
	Output string
}

// AddFlags adds the flags, with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.Options.AddFlags(fs)
	fs.StringVarP(&o.Output, "output", "o", outputText, "form of the report: text or json")
}

// Run plays a scenario and writes the report to out, and what is under way to progressOut. The error wraps fleet.ErrDiverged if nodes
// do not hold the true state at the end; the report is written all the same.
func Run(ctx context.Context, o Options, out, progressOut io.Writer) error {
	if o.Output != outputText && o.Output != outputJSON {
		return fmt.Errorf("--output is %q: use text or json", o.Output)
	}
	view := progress.New(progressOut)
	logger, err := o.Log.NewLogger(view.Log())
	if err != nil {
		return err
	}
	slog.SetDefault(logger)
	result, err := play(ctx, o.Options, logger, view)
	if result == nil {
		return err
	}
	write := result.WriteText
	if o.Output == outputJSON {
		write = result.WriteJSON
	}
	return errors.Join(err, write(out))
}

// play plays a scenario, with the view alive.
func play(ctx context.Context, o engine.Options, logger *slog.Logger, view *progress.View) (*report.Report, error) {
	viewing, stop := context.WithCancel(ctx)
	var shown sync.WaitGroup
	shown.Go(func() { view.Run(viewing) })
	defer shown.Wait()
	defer stop()
	return engine.Run(ctx, o, logger, view)
}
