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
	"github.com/slicecast/slicecast/loadtest/scenario"
)

// Options are the flags of the commands that play a scenario.
type Options struct {
	engine.Options
	Presentation
}

// AddFlags adds the flags, with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.Options.AddFlags(fs)
	o.Presentation.AddFlags(fs)
}

// Run plays a scenario, shows its progress on errOut, and presents the report on out. A run that
// fails is presented as far as it got; its error then takes precedence over missed objectives.
func Run(ctx context.Context, o Options, out, errOut io.Writer) error {
	s, err := o.Options.Validate()
	if err := errors.Join(err, o.Presentation.Validate()); err != nil {
		return usageError{err}
	}
	result, err := play(ctx, o.Options, s, errOut)
	if result == nil {
		return err
	}
	return outcome(err, o.Present(result, out, errOut))
}

// play plays a scenario and shows its progress until it is over. The report may be set beside an
// error; see engine.Run.
func play(ctx context.Context, o engine.Options, s *scenario.Scenario, errOut io.Writer) (*report.Report, error) {
	view := progress.New(errOut)
	logger, err := o.Log.NewLogger(view.Log())
	if err != nil {
		return nil, err
	}
	slog.SetDefault(logger)
	defer show(ctx, view)()
	return engine.Run(ctx, o, s, view)
}

// show shows a view until the caller calls end, which returns when nothing more is drawn.
func show(ctx context.Context, view *progress.View) (end func()) {
	ctx, stop := context.WithCancel(ctx)
	var shown sync.WaitGroup
	shown.Go(func() { view.Run(ctx) })
	return func() {
		stop()
		shown.Wait()
	}
}
