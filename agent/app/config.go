package app

import (
	"fmt"
	"io"
	"os"

	"github.com/slicecast/slicecast/agent/config"
)

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
