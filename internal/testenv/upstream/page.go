package upstream

import (
	_ "embed"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/internal/testenv/repository"
)

// combinations are the columns of the page: the names of the files of the folder results.
var combinations = []string{"kube-proxy-nftables", "slicecast-nftables", "kube-proxy-iptables", "slicecast-iptables"}

// pageHead is the beginning of docs/conformance.md.
//
//go:embed page.md.tmpl
var pageHead string

// Page returns docs/conformance.md, with another section before the list of all cases.
func Page(section string) (string, error) {
	root, err := repository.Root()
	if err != nil {
		return "", err
	}
	columns := map[string]outcomes{}
	names := map[string]bool{}
	for _, combination := range combinations {
		columns[combination], err = readResults(filepath.Join(root, resultsDir, combination+resultsSuffix))
		if err != nil {
			return "", err
		}
		for name := range columns[combination] {
			names[name] = true
		}
	}
	var page strings.Builder
	page.WriteString(pageHead)
	writeNumbers(&page, columns)
	writeRules(&page, "Cases that cannot run here", "These cases are left out, with every proxy:", cases.CannotRun)
	writeRules(&page, "Cases that do not pass everywhere", "These cases fail or skip themselves with some proxy:",
		cases.Explained)
	page.WriteString(section)
	page.WriteString("\n## All cases\n\nA dash means that the case did not run.\n\n| case |")
	for _, combination := range combinations {
		fmt.Fprintf(&page, " %s |", title(combination))
	}
	page.WriteString("\n| --- |" + strings.Repeat(" --- |", len(combinations)) + "\n")
	for _, name := range slices.Sorted(maps.Keys(names)) {
		fmt.Fprintf(&page, "| %s |", escape(strings.TrimPrefix(name, "[sig-network] ")))
		for _, combination := range combinations {
			outcome := columns[combination][name].Outcome
			if outcome == "" {
				outcome = "–"
			}
			if outcome == failed {
				outcome = "**failed**"
			}
			fmt.Fprintf(&page, " %s |", outcome)
		}
		page.WriteString("\n")
	}
	return page.String(), nil
}

// resultsDir is the folder of the outcomes, in the repository, and resultsSuffix ends its files'
// names.
const (
	resultsDir    = "internal/testenv/upstream/results"
	resultsSuffix = ".tsv"
)

// title returns the title of a column.
func title(combination string) string {
	i := strings.LastIndex(combination, "-")
	return strings.Replace(combination[:i], "slicecast", "Slicecast", 1) + ", " + combination[i+1:]
}

func writeNumbers(page *strings.Builder, columns map[string]outcomes) {
	page.WriteString("\n## Summary\n\n| proxy | passed | failed | skipped themselves |\n| --- | --- | --- | --- |\n")
	for _, combination := range combinations {
		counts := map[string]int{}
		for _, result := range columns[combination] {
			counts[result.Outcome]++
		}
		fmt.Fprintf(page, "| %s | %d | %d | %d |\n", title(combination), counts[passed], counts[failed], counts[skipped])
	}
}

func writeRules(page *strings.Builder, heading, intro string, rules []rule) {
	fmt.Fprintf(page, "\n## %s\n\n%s\n\n| cases | reason |\n| --- | --- |\n", heading, intro)
	for _, r := range rules {
		fmt.Fprintf(page, "| `%s` | %s |\n", strings.ReplaceAll(r.Match, "|", `\|`), r.Reason)
	}
}

// markup is what Markdown would not show as it is.
var markup = regexp.MustCompile(`[|\[\]*_<]`)

func escape(name string) string { return markup.ReplaceAllString(name, `\$0`) }
