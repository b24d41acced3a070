package configfile

import (
	"fmt"
	"os"
	"regexp"

	"github.com/spf13/pflag"
)

// File is the file of a program, and which flags it has set. The zero File has set none.
type File struct {
	path string
	// fields maps the flags whose values come from the file to the names of their fields.
	fields map[string]string
}

// AddFlag adds the flag --config, which names the file.
func (f *File) AddFlag(fs *pflag.FlagSet) {
	fs.StringVar(&f.path, "config", "",
		"Path to the configuration file, which docs/configuration.md describes. Flags on the command line override "+
			"it. It is read once, at the start.")
}

// Read reads the file, if there is one, into a struct of fields. It sets the flags that are not on
// the command line.
func (f *File) Read(kind string, into any, fs *pflag.FlagSet) error {
	if f.path == "" {
		return nil
	}
	content, err := os.ReadFile(f.path)
	if err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	if err := Parse(content, kind, into); err != nil {
		return fmt.Errorf("--config=%s: %w", f.path, err)
	}
	f.fields = make(map[string]string)
	for _, s := range Settings(into) {
		flag := fs.Lookup(s.Flag)
		if flag.Changed {
			continue // the command line wins
		}
		if list, ok := flag.Value.(pflag.SliceValue); ok && len(s.Values) != 1 {
			err = list.Replace(s.Values)
		} else {
			err = flag.Value.Set(s.Values[0])
		}
		if err != nil {
			return fmt.Errorf("--config=%s: %s: %w", f.path, s.Field, err)
		}
		f.fields[s.Flag] = s.Field
	}
	return nil
}

// Sets reports whether the file has set a flag.
func (f *File) Sets(flag string) bool { return f.fields[flag] != "" }

var flagInText = regexp.MustCompile(`--[a-z-]*[a-z]`)

// Named rewrites an error about flags: flags that were set in the file are called by their field's
// name.
func (f *File) Named(err error) error {
	if err == nil || len(f.fields) == 0 {
		return err
	}
	fromFile := false
	text := flagInText.ReplaceAllStringFunc(err.Error(), func(flag string) string {
		if field, ok := f.fields[flag[2:]]; ok {
			fromFile = true
			return field
		}
		return flag
	})
	if !fromFile {
		return err
	}
	return fmt.Errorf("--config=%s: %s", f.path, text)
}
