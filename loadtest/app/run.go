package app

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"

	"github.com/spf13/pflag"

	"github.com/slicecast/slicecast/loadtest/engine"
	"github.com/slicecast/slicecast/loadtest/progress"
	"github.com/slicecast/slicecast/loadtest/report"
)

// Options are the flags of the commands that run a scenario.
type Options struct {
	engine.Options
	Presentation
}

// AddFlags adds the flags, with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.Options.AddFlags(fs)
	o.Presentation.AddFlags(fs)
}

// Run plays a scenario and writes the report to out, and what is under way to progressOut. The error wraps fleet.ErrDiverged if nodes
// do not hold the true state at the end; the report is written all the same. See Presentation for errMissed.
func Run(ctx context.Context, o Options, out, progressOut io.Writer) error {
	if err := errors.Join(o.Options.Validate(), o.Presentation.Validate()); err != nil {
		return usageError{err}
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
	return errors.Join(err, o.Present(result, out, progressOut))
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
