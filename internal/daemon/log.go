package daemon

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strconv"

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
	fs.StringVar(&o.Level, "log-level", "info", "Log level: debug, info, warn or error.")
	fs.VarP(&verbosity{flags: fs}, "v", "v", "Log level as a number, as other components of Kubernetes take it: "+
		"0 to 2 mean --log-level=info, and more means --log-level=debug.")
	fs.StringVar(&o.Format, "log-format", "text", "Log format: text or json.")
}

// debugVerbosity is the least verbosity that stands for the level debug. Kubernetes' logging
// conventions have what operators need at 0 to 2, and what explains single changes from 3 on.
const debugVerbosity = 3

// verbosity is a flag that sets the flag --log-level. The last one of the two wins.
type verbosity struct {
	flags *pflag.FlagSet
	given string
}

// String implements pflag.Value.
func (v *verbosity) String() string { return v.given }

// Type implements pflag.Value.
func (v *verbosity) Type() string { return "int" }

// Set implements pflag.Value.
func (v *verbosity) Set(value string) error {
	n, err := strconv.ParseUint(value, 10, 31)
	if err != nil {
		return errors.New("use a number from 0 to 10, or --log-level")
	}
	v.given = value
	level := "info"
	if n >= debugVerbosity {
		level = "debug"
	}
	return v.flags.Set("log-level", level)
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
