package daemon

import (
	"fmt"
	"io"
	"log/slog"

	"github.com/spf13/pflag"
)

// LogOptions are the flags for logging.
type LogOptions struct {
	// Level is debug (lines about each stream and update), info (lines about state changes of
	// the process), warn or error.
	Level string
	// Format is text or json.
	Format string
}

// AddFlags adds the flags with their defaults.
func (o *LogOptions) AddFlags(fs *pflag.FlagSet) {
	fs.StringVarP(&o.Level, "log-level", "v", "info", "Log level: debug, info, warn or error.")
	fs.StringVar(&o.Format, "log-format", "text", "Log format: text or json.")
}

// NewLogger returns a logger that writes to w as the options say.
func (o *LogOptions) NewLogger(w io.Writer) (*slog.Logger, error) {
	level, ok := map[string]slog.Level{
		"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError,
	}[o.Level]
	if !ok {
		return nil, fmt.Errorf("--log-level is %q: use debug, info, warn or error", o.Level)
	}
	handlerOptions := &slog.HandlerOptions{Level: level}
	switch o.Format {
	case "text":
		return slog.New(slog.NewTextHandler(w, handlerOptions)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, handlerOptions)), nil
	}
	return nil, fmt.Errorf("--log-format is %q: use text or json", o.Format)
}
