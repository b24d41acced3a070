package performance

import (
	"bytes"

	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/report/page"
)

const (
	// Sample is the name of the report that is also checked in whole, as SampleReport.
	Sample = "server-failover-100"
	// SampleReport is a report as slicecast-loadtest writes it, relative to the module's root.
	SampleReport = "docs/sample-report.json"
	// SamplePage is the HTML page of SampleReport.
	SamplePage = "docs/sample-report.html"
)

// PageOf returns the HTML page of a report.
func PageOf(content []byte) (string, error) {
	r, err := report.Read(bytes.NewReader(content))
	if err != nil {
		return "", err
	}
	var out bytes.Buffer
	err = page.Write(&out, report.DefaultTolerance, r)
	return out.String(), err
}
