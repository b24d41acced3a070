package app

import (
	"fmt"
	"io"
	"os"
	"regexp"

	"github.com/spf13/pflag"

	"github.com/slicecast/slicecast/agent/config"
)

// readConfig sets the flags that were not given to their values in the configuration file, if there
// is one.
func (o *Options) readConfig(fs *pflag.FlagSet) error {
	if o.ConfigFile == "" {
		return nil
	}
	content, err := os.ReadFile(o.ConfigFile)
	if err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	c, err := config.Parse(content)
	if err != nil {
		return fmt.Errorf("--config=%s: %w", o.ConfigFile, err)
	}
	o.fields = make(map[string]string)
	for _, s := range c.Settings() {
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
			return fmt.Errorf("--config=%s: %s: %w", o.ConfigFile, s.Field, err)
		}
		o.fields[s.Flag] = s.Field
	}
	return nil
}

var flagInText = regexp.MustCompile(`--[a-z-]*[a-z]`)

// named rewrites an error about flags: flags that were set in the configuration file are called by
// their field's name.
func (o *Options) named(err error) error {
	if err == nil || len(o.fields) == 0 {
		return err
	}
	fromFile := false
	text := flagInText.ReplaceAllStringFunc(err.Error(), func(flag string) string {
		if field, ok := o.fields[flag[2:]]; ok {
			fromFile = true
			return field
		}
		return flag
	})
	if !fromFile {
		return err
	}
	return fmt.Errorf("--config=%s: %s", o.ConfigFile, text)
}

// migrateConfig converts kube-proxy's configuration and writes the result to out. It tells the user
// which fields were not carried over, and what differs.
func (o *Options) migrateConfig(in io.Reader, out, user io.Writer) error {
	var content []byte
	var err error
	if o.MigrateFile == "-" {
		content, err = io.ReadAll(in)
	} else {
		content, err = os.ReadFile(o.MigrateFile)
	}
	if err != nil {
		return fmt.Errorf("--migrate-config: %w", err)
	}
	m, err := config.Migrate(content)
	if err != nil {
		return fmt.Errorf("--migrate-config=%s: %w", o.MigrateFile, err)
	}
	for _, l := range m.Lost {
		fmt.Fprintln(user, "not carried over:", l)
	}
	for _, n := range m.Notes {
		fmt.Fprintln(user, "note:", n)
	}
	b, err := m.YAML()
	if err != nil {
		return err
	}
	_, err = out.Write(b)
	return err
}
