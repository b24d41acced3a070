// These tests prove that docs/performance.md, the pages behind it and the sample report say what
// the checked-in reports and benchmarks do. Missing, bad and mixed reports are errors or are named
// on the page.
package performance_test

import (
	"bytes"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"
	"golang.org/x/perf/benchfmt"

	"github.com/slicecast/slicecast/loadtest/performance"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/report/reporttest"
)

const root = "../.."

func checkedIn(t *testing.T) *performance.Measured {
	t.Helper()
	m, err := performance.CheckedIn()
	require.NoError(t, err)
	return m
}

// pages returns the content of one of the pages, such as "server".
func pages(t *testing.T, m *performance.Measured, name string) string {
	t.Helper()
	files, err := m.Files()
	require.NoError(t, err)
	require.Contains(t, files, "docs/performance/"+name+".md")
	return files["docs/performance/"+name+".md"]
}

// TestPagesAreCurrent checks that the pages and their chart match the reports.
func TestPagesAreCurrent(t *testing.T) {
	files, err := checkedIn(t).Files()
	require.NoError(t, err)
	for name, content := range files {
		have, err := os.ReadFile(filepath.Join(root, name))
		require.NoError(t, err)
		require.Equal(t, string(have), content, "%s does not match its reports: run 'go run ./internal/tools/performance' in the module's root", name)
	}
	have, err := filepath.Glob(filepath.Join(root, "docs/performance/*"))
	require.NoError(t, err)
	require.Len(t, have, len(files)-2, "a page in docs/performance is not generated")
	const screen = 45
	require.LessOrEqual(t, strings.Count(files["docs/performance.md"], "\n"), screen, "docs/performance.md is to be one screen")
}

// TestSampleIsCurrent checks that the sample of a report is one that is written today, and that its
// page is made of it.
func TestSampleIsCurrent(t *testing.T) {
	content, err := os.ReadFile(filepath.Join(root, performance.SampleReport))
	require.NoError(t, err)
	require.NoError(t, reporttest.Validate(content))
	r, err := report.Read(bytes.NewReader(content))
	require.NoError(t, err)
	require.True(t, r.OK())
	require.NotEmpty(t, r.Repeats[0].Series, "the sample is trimmed")
	var again bytes.Buffer
	require.NoError(t, report.WriteJSON(&again, r))
	require.Equal(t, string(content), again.String())
	page, err := performance.PageOf(content)
	require.NoError(t, err)
	have, err := os.ReadFile(filepath.Join(root, performance.SamplePage))
	require.NoError(t, err)
	require.Equal(t, string(have), page, "%s does not match %s: run 'go run ./internal/tools/performance' in the module's root", performance.SamplePage, performance.SampleReport)
	const most = 300 << 10
	require.Less(t, len(page), most)
}

func TestReportsAreGood(t *testing.T) {
	m := checkedIn(t)
	known := make(map[string]bool)
	for _, c := range performance.Commands() {
		require.NotEmpty(t, c.Command)
		require.False(t, known[c.File()], "duplicate command %s", c.Name)
		known[c.File()] = true
	}
	for name, r := range m.Reports {
		require.True(t, known[name+".json"], "no command produces %s", name)
		require.True(t, r.OK(), name)
		require.NotEmpty(t, r.Summary, name)
		require.Empty(t, r.Repeats[0].Series, "%s is not trimmed", name)
		content, err := os.ReadFile(filepath.Join("reports", name+".json"))
		require.NoError(t, err)
		require.NoError(t, reporttest.Validate(content), name)
	}
	for name := range m.Benches {
		require.True(t, known[name+".txt"], "no command produces %s", name)
	}
}

func TestMissingFiguresAreErrors(t *testing.T) {
	m := checkedIn(t)
	_, err := m.Figure("steady-7", "p99")
	require.ErrorContains(t, err, "there is no report steady-7: use one of ")
	_, err = m.Figure("steady-1000", "p98")
	require.ErrorContains(t, err, "has no metric p98: use one of ")
	_, err = m.Bench("ingest", "Ingest/readers=100", "apples")
	require.ErrorContains(t, err, "has no value in apples")
	_, err = m.Bench("pears", "Ingest/readers=100", "apples")
	require.ErrorContains(t, err, "there is no report pears: use one of agent, ingest, ")

	delete(m.Reports["rate-50"].Summary, "p99")
	_, err = m.Files()
	require.ErrorContains(t, err, "report rate-50 has no metric p99")
	delete(m.Reports["headline-1000"].Summary, "changes-cpu")
	_, err = m.Chart()
	require.ErrorContains(t, err, "report headline-1000 has no metric changes-cpu")

	m = checkedIn(t)
	m.Reports["rate-50"].Machine.CPUs = 64
	_, err = m.Files()
	require.ErrorContains(t, err, "the machine differs between reports")

	m = checkedIn(t)
	m.Benches["ingest"][0].SetConfig("cpu", "Abacus")
	_, err = m.Files()
	require.ErrorContains(t, err, "ingest was measured on a machine with Abacus")

	m = checkedIn(t)
	m.Benches["node-ipvs"] = m.Benches["ingest"]
	_, err = m.Files()
	require.ErrorContains(t, err, "report node-ipvs has no figure of {kube-proxy Node/1000x50+5000/ipvs/kube-proxy}")

	m = checkedIn(t)
	delete(m.Reports, "apiserver-headline-1")
	_, err = m.Files()
	require.ErrorContains(t, err, "there is no report apiserver-headline-1")
}

func TestBadReports(t *testing.T) {
	for name, content := range map[string]string{
		"a.json": `{"schema": "slicecast-loadtest/v1"}`, "b.txt": "nothing\n", "c.txt": "BenchmarkX 1 2\n",
	} {
		_, err := performance.Read(fstest.MapFS{name: {Data: []byte(content)}})
		require.ErrorContains(t, err, name+": ")
	}
	_, err := performance.Read(os.DirFS(filepath.Join(t.TempDir(), "none")))
	require.ErrorIs(t, err, fs.ErrNotExist)
}

// TestHeadline uses made-up figures of the headline. The writes cost as much as one watcher.
func TestHeadline(t *testing.T) {
	m := checkedIn(t)
	set(m.Reports["headline-1000"], "changes-bytes", 1<<30)
	set(m.Reports["headline-1000"], "changes-cpu", 10)
	set(m.Reports["apiserver-headline-1000"], "changes-bytes", 1<<40)
	set(m.Reports["apiserver-headline-1000"], "changes-cpu", 740)
	set(m.Reports["apiserver-headline-1"], "changes-cpu", 100)
	set(m.Reports["apiserver-headline-100"], "changes-cpu", 200)
	peers := pages(t, m, "peers")
	require.Contains(t, peers, "| Slicecast | 1000 | 1.00 GiB | 10.0 s |")
	require.Contains(t, peers, "| kube-apiserver: watches and the writes | 1000 | 1.00 TiB | 740 s |")
	require.Contains(t, peers, "| … of which the writes: all of it with one watcher | 1 | | 100 s | |\n| … and the watches | 1000 | | 640 s | |\n")
	require.Contains(t, peers, "Slicecast's share of the watches | | 1/1,024 | 1/64 |")
	require.Contains(t, peers, "| … of the watches and the writes | | | 1/74 | |")
	require.Contains(t, peers, "3 times those of 1000 nodes | 3000 | 3.00 TiB | 1920 s |", "the writes do not grow with the number of nodes")
	require.Regexp(t, `\d+ KiB × 5000 replaced pods × 3000 nodes = [0-9.]+ TiB`, peers)
	require.Regexp(t, `\d+ KiB × 1000 syncs, two for each 10 pods, × 3000 nodes = [0-9.]+ TiB`, peers)
	files, err := m.Files()
	require.NoError(t, err)
	require.Contains(t, files["docs/performance.md"], "bytes, beside a kube-apiserver's | ≤ 1/50 | 1/1,024 |")
	require.Contains(t, files["docs/performance.md"], "server CPU, beside its watches alone | ≤ 1/8 | 1/64 |")
	svg, err := m.Chart()
	require.NoError(t, err)
	require.Contains(t, svg, "bytes to all nodes, kube-apiserver: 1.00 TiB")
	require.Contains(t, svg, "server CPU, kube-apiserver&#39;s watches alone: 640 s.")

	set(m.Reports["apiserver-headline-1000"], "changes-cpu", 170)
	files, err = m.Files()
	require.NoError(t, err)
	require.Contains(t, files["docs/performance.md"], "watches alone | ≤ 1/8 | 1/7, **missed** |", "the bound applies to the watches alone")
}

// TestPeers uses made-up figures of single changes.
func TestPeers(t *testing.T) {
	m := checkedIn(t)
	set(m.Reports["apiserver-steady-1"], "cpu-per-update", 8000)
	set(m.Reports["apiserver-steady-100"], "cpu-per-update", 200)
	set(m.Reports["stack-steady-1000"], "api-server-cpu-per-change", 9000)
	peers := pages(t, m, "peers")
	_, after, ok := strings.Cut(peers, "part of the write, 100 watchers | 200 µs |")
	require.True(t, ok)
	_, after, _ = strings.Cut(after, "\n")
	require.True(t, strings.HasPrefix(after, "| … the watch alone | 120 µs | | |\n"), after)
	require.Contains(t, peers, "| … that API server, which writes and has that one watcher: a node's part | 9.00 µs | | |")
}

// TestBenches uses made-up benchmarks of a node, in two runs.
func TestBenches(t *testing.T) {
	const head = "commit: c\nkube-proxy: Kubernetes v1\n"
	m, err := performance.Read(fstest.MapFS{"b.txt": {Data: []byte(head +
		"BenchmarkNode/10x5/iptables-nft/kube-proxy-2 1 20 change-ms\n" +
		"        cpu: QEMU TCG CPU version 2.5+\n" +
		"    suite.go:12: BenchmarkNode/10x5/iptables-nft/kube-proxy-2 1 40 change-ms 3 rss-MiB 12345 first-conn/s\n" +
		"        BenchmarkNode/10x5/iptables-nft/slicecast 1 15 change-ms 0 touched\n")}})
	require.NoError(t, err)
	change, err := m.Bench("b", "Node/10x5/iptables-nft/kube-proxy", "change-ms")
	require.NoError(t, err)
	require.Equal(t, report.Spread{Unit: report.Millis, Median: 30, Min: 20, Max: 40, Values: []float64{20, 40}}, change)
	all := checkedIn(t)
	all.Benches["b"], all.Benches["node-iptables"] = m.Benches["b"], nil
	for _, r := range m.Benches["b"] {
		for _, size := range []string{"1000x50+5000", "10000x5"} {
			for _, mode := range []string{"nft", "legacy"} {
				other := r.Clone()
				other.Name = []byte(strings.NewReplacer("10x5", size, "nft", mode).Replace(string(r.Name)))
				all.Benches["node-iptables"] = append(all.Benches["node-iptables"], other)
			}
		}
	}
	node := pages(t, all, "node")
	require.Contains(t, node, "until the rules are in place, median | 30.0 ms (20.0 ms to 40.0 ms) | 15.0 ms | 1/2 (1/2.67 to 1/1.33) |")
}

// TestStalls uses reports of Slicecast with gaps of 6 ms, where the floor's gap is 4 or 7 ms, and a
// flow that older reports do not have.
func TestStalls(t *testing.T) {
	const flow = "| … longest gap: a Service |"
	m := checkedIn(t)
	m.Benches["stall-iptables-nft"] = stalls(t, "", "")
	_, table, ok := strings.Cut(pages(t, m, "node"), "(`stall-iptables-nft`):")
	require.True(t, ok)
	require.Contains(t, table, "| … longest gap: floor | 4.00 ms | 7.00 ms |\n| … longest gap: past Services | 6.00 ms, **missed** | 6.00 ms |\n")
	require.NotContains(t, table, flow)
	require.Contains(t, table, "lost, in all phases | 0 | 0 |")

	m.Benches["stall-iptables-nft"] = stalls(t, " 5 restart-floor-gap-ms 5.01 restart-service-gap-ms 2 restart-service-lost", " 5.01 restart-floor-gap-ms 6 restart-service-gap-ms")
	_, table, ok = strings.Cut(pages(t, m, "node"), "(`stall-iptables-nft`):")
	require.True(t, ok)
	require.Contains(t, table, flow+" 5.01 ms, **missed** | 6.00 ms |")
	require.Contains(t, table, "lost, in all phases | 2 | 0 |")

	m.Benches["stall-iptables-nft"] = stalls(t, " 6 restart-service-gap-ms", "")
	_, err := m.Files()
	require.ErrorContains(t, err, "has no value in restart-floor-gap-ms", "a gap cannot be judged without a floor")
}

// stalls returns benchmarks of both sizes with more figures each.
func stalls(t *testing.T, first, second string) []*benchfmt.Result {
	t.Helper()
	m, err := performance.Read(fstest.MapFS{"b.txt": {Data: []byte("commit: c\ncpu: AMD EPYC\n" +
		"BenchmarkStall/44125x1/iptables-nft/slicecast 1 4 program-floor-gap-ms 6 program-past-gap-ms 0 program-past-lost" + first + "\n" +
		"BenchmarkStall/5005x49+4766/iptables-nft/slicecast 1 7 program-floor-gap-ms 6 program-past-gap-ms 0 program-past-lost" + second + "\n")}})
	require.NoError(t, err)
	return m.Benches["b"]
}

// set sets a figure of a report.
func set(r *report.Report, metric string, v float64) {
	s := r.Summary[metric]
	s.Median, s.Min, s.Max, s.Values = v, v, v, []float64{v}
	r.Summary[metric] = s
}

func TestBoundsAreJudged(t *testing.T) {
	m := checkedIn(t)
	row := func() string {
		_, row, ok := strings.Cut(pages(t, m, "server"), "| p99 of a single update, 3000 nodes | ")
		require.True(t, ok)
		row, _, _ = strings.Cut(row, "\n")
		return row
	}
	set(m.Reports["steady-3000"], "p99", 99.9)
	require.Equal(t, "< 100 ms | 99.9 ms | `steady-3000` |", row())
	set(m.Reports["steady-3000"], "p99", 100)
	require.Equal(t, "< 100 ms | 100 ms, **missed** | `steady-3000` |", row())
	s := m.Reports["steady-3000"].Summary["p99"]
	s.Median, s.Min, s.Max, s.Values = 90, 80, 101, []float64{80, 101, 90}
	m.Reports["steady-3000"].Summary["p99"] = s
	require.Equal(t, "< 100 ms | 90.0 ms (80.0 ms to 101 ms), **missed in 1 of 3 runs** | `steady-3000` |", row(), "every repeat has to keep the bound")
	s.Median, s.Values = 101, []float64{80, 101, 101}
	m.Reports["steady-3000"].Summary["p99"] = s
	require.Equal(t, "< 100 ms | 101 ms (80.0 ms to 101 ms), **missed** | `steady-3000` |", row())
}

// TestHowManyNodesFit uses made-up reports.
func TestHowManyNodesFit(t *testing.T) {
	m := checkedIn(t)
	add := func(name string, nodes int, relays, gibibytes, files float64) {
		r := *m.Reports["steady-3000"]
		r.Nodes, r.Processes, r.Machine.OpenFiles, r.Machine.Ports = nodes, 2, int64(files), 28_000
		r.Machine.Memory = 24 << 30
		r.Scenario.Parameters = map[string]any{"relays": relays, "servers": 1., "rate": 5.}
		r.Summary = maps.Clone(r.Summary)
		set(&r, "server-peak", gibibytes*(1<<28))
		set(&r, "client-peak", gibibytes*(3<<28))
		m.Reports[name] = &r
	}
	for _, r := range m.Reports {
		r.Machine.Memory = 24 << 30
	}
	add("steady-10000", 10_000, 0, 8, 20_000)
	add("relays-20000", 20_000, 2, 18, 20_000)
	set(m.Reports["steady-10000"], "p99", 1000)
	set(m.Reports["relays-20000"], "p50", 5000)
	set(m.Reports["relays-20000"], "p99", 9000)
	set(m.Reports["relays-20000"], "server-cores", 0.8)
	set(m.Reports["relays-20000"], "client-cores", 1.1)
	text := pages(t, m, "sizes")
	require.Contains(t, text, "| `steady-10000` | 10000 | 1 | 2.00 GiB | 6.00 GiB, in 2 | 839 KiB | 33 % |")
	require.Contains(t, text, "| `steady-10000` | 30000 | 19936 | 28000 | files |")
	require.Contains(t, text, "| `relays-20000` | 26666 | 31897 | 44800 | memory |")
	require.Contains(t, text, "| `relays-20000` | 20000 | 5.00 s / 9.00 s | **no** | 40 % | 55 % | 95 % |")
	require.Regexp(t, "[|] `steady-10000` [|] 10000 [|] [^|]+ / 1.00 s [|] yes [|]", text)
	m.Reports["relays-20000"].Machine.OpenFiles = 1 << 30
	set(m.Reports["relays-20000"], "client-peak", 1<<20)
	set(m.Reports["relays-20000"], "server-peak", 1<<20)
	require.Contains(t, pages(t, m, "sizes"), "| 44800 | ports |")

	m.Reports["relays-20000"].Machine.Ports = 0
	_, err := m.Files()
	require.ErrorContains(t, err, "report relays-20000 does not have the limits of files and ports")
}

// TestReportsOfSeveralCommits checks that all pages say at which commit they were measured, and
// which reports are of which if there are several.
func TestReportsOfSeveralCommits(t *testing.T) {
	m := checkedIn(t)
	require.NotContains(t, m.Benches, "rate-50")
	for _, r := range m.Reports {
		r.Versions.Slicecast = "v1"
	}
	for _, results := range m.Benches {
		for _, r := range results {
			r.SetConfig("commit", "v1")
		}
	}
	requireOnAllPages := func(text, link string) {
		files, err := m.Files()
		require.NoError(t, err)
		for name, content := range files {
			switch {
			case name == "docs/performance.md":
				require.Contains(t, content, text+strings.Replace(link, "METHOD", "performance/method", 1))
			case strings.HasSuffix(name, ".md"):
				require.Contains(t, content, text+strings.Replace(link, "METHOD", "method", 1), name)
			}
		}
	}
	requireOnAllPages("All figures were measured at commit v1.", "")
	m.Reports["rate-50"].Versions.Slicecast = "v2"
	requireOnAllPages("**The figures were measured at 2 commits:** ", "[which report at which](METHOD.md#reports).")
	require.Contains(t, pages(t, m, "method"), "| `rate-50` | v2 | `slicecast-loadtest run --scenario=steady --nodes=1000 --rate=50` |")
	m.Benches["ingest"][0].SetConfig("commit", "")
	_, err := m.Files()
	require.ErrorContains(t, err, "there is no report ingest, or it does not say its commit")
}

// TestBench runs the script with fake programs, one of which fails.
func TestBench(t *testing.T) {
	const commit = "v0.0.0-1"
	for repeats, want := range map[string]string{
		"":  "{run --good --repeats=2 --output=json}\n",             // the number in the command
		"3": "{run --good --repeats=2 --repeats=3 --output=json}\n", // the last flag counts
	} {
		t.Run("REPEATS="+repeats, func(t *testing.T) {
			dir, out, err := bench(t, commit, "REPEATS="+repeats)
			require.Error(t, err)
			require.Contains(t, out, "failed: bad empty; see above, bin/bench/NAME.failed.json and NAME.log")
			for name, want := range map[string]string{
				"bad.failed.json": "{bad}\n", "bad.log": "under way\n", "good.json": want, "good.txt": "shown\n", "empty.log": "under way\n",
				"bench.txt": "commit: " + commit + "\n",
			} {
				have, err := os.ReadFile(filepath.Join(dir, "bin/bench", name))
				require.NoError(t, err)
				require.Equal(t, want, string(have), name)
			}
			require.NoFileExists(t, filepath.Join(dir, "bin/bench/bad.json"), "a failed report must not be on the page")
			went, err := os.ReadFile(filepath.Join(dir, "went"))
			require.NoError(t, err)
			require.Equal(t, built+"test -run ^$\nrun ./internal/tools/performance bin/bench good bench\n", string(went))
		})
	}
}

// built is what the script first calls the go command with.
const built = "build -buildvcs=auto -o bin/slicecast-loadtest ./loadtest\nversion -m bin/slicecast-loadtest\n"

// TestBenchOfNoCommit requires a clean work tree, unless only some reports are measured.
func TestBenchOfNoCommit(t *testing.T) {
	_, out, failed := bench(t, "(devel)")
	require.Error(t, failed)
	require.Contains(t, out, "measure in a clone")
	for only, went := range map[string]string{"": built, "bench": built + "test -run ^$\nrun ./internal/tools/performance bin/bench bench\n"} {
		dir, out, failed := bench(t, "v0.0.0-1+dirty", "ONLY="+only)
		require.Equal(t, only == "", failed != nil, out)
		require.Equal(t, only == "", strings.Contains(out, "commit them first"), out)
		have, err := os.ReadFile(filepath.Join(dir, "went"))
		require.NoError(t, err)
		require.Equal(t, went, string(have))
	}
}

// bench runs the script in a folder of its own. It returns the folder, the script's output and its
// error.
func bench(t *testing.T, commit string, environment ...string) (dir, out string, failed error) {
	t.Helper()
	dir = t.TempDir()
	script, err := os.ReadFile(filepath.Join(root, "internal/tools/bench.sh"))
	require.NoError(t, err)
	for name, content := range map[string]string{
		"internal/tools/bench.sh":           string(script),
		"loadtest/performance/commands.txt": "bad: slicecast-loadtest run --bad\ngood: slicecast-loadtest run --good --repeats=2\nempty: slicecast-loadtest run --none\nbench: go test -run '^$'\n",
		"bin/slicecast-loadtest":            "#!/bin/sh\necho under way >&2\ncase \"$*\" in show*) echo shown;; *--none*) exit 1;; *--bad*) echo '{bad}'; exit 1;; *) echo \"{$*}\";; esac\n",
		"path/go":                           "#!/bin/sh\necho \"$*\" >>" + dir + "/went\ncase \"$*\" in version*) printf '\\tmod\\tgithub.com/x\\t" + commit + "\\t\\n';; esac\n",
	} {
		file := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o700))
		require.NoError(t, os.WriteFile(file, []byte(content), 0o700))
	}
	c := exec.CommandContext(t.Context(), filepath.Join(dir, "internal/tools/bench.sh"))
	c.Env = append(append(os.Environ(), "PATH="+filepath.Join(dir, "path")+":"+os.Getenv("PATH")), environment...)
	said, failed := c.CombinedOutput()
	return dir, string(said), failed
}
