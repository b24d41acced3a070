package upstream

import (
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
const pageHead = `# Conformance

<!-- Generated from internal/testenv/upstream by internal/tools/conformancedoc. Do not edit; run 'make generate'. -->

Kubernetes has end-to-end tests of Services and the network: all cases of ` + "`[sig-network]`" + ` in ` + "`test/e2e/network`" + ` and
` + "`test/e2e/common/network`" + `. This page has their outcomes in the same cluster with kube-proxy and with Slicecast as the
only proxy, for each programmer. The tests are unchanged, and of the version that the cluster runs.

The cluster is that of ` + "`make cluster`" + `: three nodes in three zones, each with its own containerd and kubelet, with IPv4
and IPv6. A small load balancer in the test gives Services of type LoadBalancer an address. It routes the address to the
nodes that pass their health checks.

Run the tests yourself, as root, on Linux with Go, make and git. A run takes half an hour to an hour on two CPUs:

` + "```sh" + `
make e2e-upstream                                            # all cases, with Slicecast and nftables
make e2e-upstream PROXY=kube-proxy PROGRAMMER=iptables
make e2e-upstream FOCUS='session affinity'                   # cases whose names match
make e2e-upstream RECORD=1 && make generate                  # update this page
` + "```" + `

Ten of the cases are a part of ` + "`make test`" + `, with both programmers. The conformance cases of this repository are
[another proof](../internal/conformance/testdata/scenarios/README.md): single connections, judged packet by packet.
`

// Page returns docs/conformance.md.
func Page() (string, error) {
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
	proxy, programmer, _ := strings.Cut(strings.Replace(combination, "kube-proxy", "kube_proxy", 1), "-")
	return strings.NewReplacer("kube_proxy", "kube-proxy", "slicecast", "Slicecast").Replace(proxy) + ", " + programmer
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
