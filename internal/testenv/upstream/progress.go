package upstream

import (
	"bytes"
	"regexp"
	"strings"
)

// progress reads what ginkgo prints, and reports a line for each case that has ended. It is used by
// one goroutine.
type progress struct {
	logf func(format string, args ...any)

	rest    []byte // the beginning of a line
	total   string // the number of cases
	done    int
	outcome string // that of the case that the next line names, or empty
}

var (
	// totalLine is what ginkgo prints first.
	totalLine = regexp.MustCompile(`^Will run (\d+) of \d+ specs`)
	// endLine is what ginkgo prints when a case has ended, before the name of the case.
	endLine = regexp.MustCompile(`^[•S] \[([A-Z]*)[^]]*\]( \[.*\])?$`)
	// decoration is what that line has besides the name: a mark in the case that failed, and
	// labels.
	decoration = regexp.MustCompile(` \[It\]| \[sig-network[^]]*\]$`)
)

// Write implements io.Writer.
func (p *progress) Write(content []byte) (int, error) {
	p.rest = append(p.rest, content...)
	for {
		line, rest, whole := bytes.Cut(p.rest, []byte("\n"))
		if !whole {
			return len(content), nil
		}
		p.readLine(string(line))
		p.rest = rest
	}
}

func (p *progress) readLine(line string) {
	if p.outcome != "" {
		p.done++
		p.logf("%d of %s: %s: %s", p.done, p.total, p.outcome, decoration.ReplaceAllString(line, ""))
		p.outcome = ""
		return
	}
	if total := totalLine.FindStringSubmatch(line); total != nil {
		p.total = total[1]
	}
	if end := endLine.FindStringSubmatch(line); end != nil {
		p.outcome = strings.ToLower(end[1])
		if p.outcome == "" {
			p.outcome = passed
		}
	}
}
