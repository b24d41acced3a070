package app

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/slicecast/slicecast/loadtest/report"
)

func newShowCommand() *cobra.Command {
	p := &Presentation{}
	c := &cobra.Command{
		Use:   "show REPORT.json...",
		Short: "Print reports that were written with --output=json, or write pages of them",
		Long: `show prints reports that were written with --output=json, and judges them by --require. With --html, it also writes one page
that compares the first report with each of the others.

It reads only reports of the schema ` + report.Schema + `, and rejects others.
` + exitCodes,
		Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, files []string) error {
			if err := p.Validate(); err != nil {
				return err
			}
			var reports []*report.Report
			for _, name := range files {
				r, err := readReport(name)
				if err != nil {
					return err
				}
				reports = append(reports, r)
			}
			if err := p.writePage(report.DefaultTolerance, reports...); err != nil {
				return err
			}
			each := *p
			each.HTML = ""
			var failed, errs []error
			for i, r := range reports {
				if i > 0 && p.Output == outputText {
					fmt.Fprintln(c.OutOrStdout())
				}
				errs = append(errs, each.Present(r, c.OutOrStdout(), c.ErrOrStderr()))
				if !r.OK() {
					failed = append(failed, fmt.Errorf("%s is the report of a failed run", files[i]))
				}
			}
			return outcome(errors.Join(failed...), errors.Join(errs...))
		},
	}
	p.AddFlags(c.Flags())
	return c
}

func readReport(name string) (*report.Report, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	r, err := report.Read(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return r, nil
}
