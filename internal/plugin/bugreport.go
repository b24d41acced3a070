package plugin

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/plugin/redact"
	"github.com/slicecast/slicecast/internal/show"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

const (
	// maxReportTime bounds the time that a bug report takes. What is missing then is left out.
	maxReportTime = 15 * time.Minute
	// parallelParts is how many servers and nodes are read at the same time. Each may need
	// maxInspected bytes of memory.
	parallelParts = 4
	// maxInspected bounds what slicecast-agent inspect may print, in bytes. It is more than that
	// command prints, in JSON.
	maxInspected = 64 << 20
	// inspectTime bounds the time of slicecast-agent inspect, which reads all rules of a node.
	inspectTime = 2 * time.Minute
)

// bugreport is the command and its flags.
type bugreport struct {
	*options

	output  string
	nodes   []string
	sample  int
	seed    uint64
	since   time.Duration
	partial bool

	progressMu sync.Mutex // guards progress
	progress   io.Writer
}

func newBugreportCommand(o *options) *cobra.Command {
	b := &bugreport{options: o}
	c := &cobra.Command{
		Use:   "bugreport",
		Short: "Write what is needed to find a problem to an archive, without secrets",
		Long: `bugreport writes an archive with an index, index.html. It has the status, settings, logs and metrics of all servers and
relays, the latest changes, what check finds, and for some nodes also what their agents say and what their kernels hold.
The nodes are those that are not connected, behind, or in trouble first, and then random ones.

Secrets are left out: tokens, keys, credentials, the values of environments and annotations, and messages of objects.
Names of Services, Pods and nodes and IP addresses are not. Look at the archive before you give it to others.

It uses your rights. Logs need the right to pods/log, and what agents' nodes hold needs the right to pods/exec. What
cannot be had is named in the index, and then the exit code is 2.`,
		Example: `  kubectl slicecast bugreport
  kubectl slicecast bugreport --nodes=node-1,node-2 --since=10m
  kubectl slicecast bugreport --output=- | tar -xz`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return b.run(c) },
	}
	fs := c.Flags()
	fs.StringVar(&b.output, "output", "", "Path of the archive, or - for standard output. If empty, it is slicecast-bugreport-TIME.tar.gz.")
	fs.StringSliceVar(&b.nodes, "nodes", nil, "Comma-separated names of the nodes to look at, instead of a sample.")
	fs.IntVar(&b.sample, "sample", 10, "Number of nodes to look at.")
	fs.Uint64Var(&b.seed, "seed", 0, "Seed by which random nodes are chosen; 0 means a new one, which is printed.")
	fs.DurationVar(&b.since, "since", time.Hour, "How much of the logs is read.")
	fs.BoolVar(&b.partial, "partial", false, "If it is interrupted, write what has been read so far. Otherwise nothing is left.")
	c.MarkFlagsMutuallyExclusive("nodes", "sample")
	return c
}

func (b *bugreport) validate() error {
	switch {
	case b.sample < 0:
		return fmt.Errorf("--sample is %d: use the number of nodes to look at, or 0 for none", b.sample)
	case b.since <= 0:
		return fmt.Errorf("--since is %v: use a positive duration", b.since)
	}
	if target, err := os.Stat(b.output); err == nil && target.IsDir() {
		return fmt.Errorf("--output is the folder %s: name a file in it", b.output)
	}
	return nil
}

// say prints what is going on.
func (b *bugreport) say(format string, args ...any) {
	b.progressMu.Lock()
	defer b.progressMu.Unlock()
	fmt.Fprintln(b.progress, show.Printable(fmt.Sprintf(format, args...)))
}

// run writes the report to a file beside its place, and moves it there when it is complete.
func (b *bugreport) run(c *cobra.Command) (err error) {
	if err := b.validate(); err != nil {
		return err
	}
	f, err := b.fleet()
	if err != nil {
		return err
	}
	defer f.Close()
	b.progress = c.ErrOrStderr()
	now := time.Now()
	name := "slicecast-bugreport-" + now.UTC().Format("20060102T150405Z")
	dir, target := "", b.output
	if target == "" {
		target = name + ".tar.gz"
	}
	if target != "-" {
		dir = filepath.Dir(target)
	}
	spool, err := os.CreateTemp(dir, ".slicecast-bugreport-")
	if err != nil {
		return fmt.Errorf("--output: %w; choose a folder that you may write to", err)
	}
	defer func() {
		if closed := spool.Close(); !errors.Is(closed, os.ErrClosed) {
			err = errors.Join(err, closed)
		}
		if removed := os.Remove(spool.Name()); !errors.Is(removed, os.ErrNotExist) {
			err = errors.Join(err, removed)
		}
	}()
	redactor := &redact.Redactor{}
	redactor.Know(f.Secrets()...)
	a := newArchive(spool, name, redactor)
	index := b.collect(c.Context(), f, a)
	index.Time, index.Version = now.UTC().Format(time.RFC3339), daemon.Version()
	if c.Context().Err() != nil {
		if !b.partial {
			return errors.New("interrupted: nothing was written; --partial writes what has been read")
		}
		index.Note = "This report is incomplete, because it was interrupted."
	}
	if err := a.finish(index); err != nil {
		return err
	}
	if err := b.deliver(spool, target, c.OutOrStdout()); err != nil {
		return err
	}
	if missing := a.missing(); missing > 0 || index.Note != "" {
		b.say("%s missing or incomplete: index.html says which and why", show.Plural("part", missing))
		return exitError(incomplete)
	}
	return nil
}

// deliver moves the archive to its place.
func (b *bugreport) deliver(spool *os.File, target string, out io.Writer) error {
	if target == "-" {
		if _, err := spool.Seek(0, io.SeekStart); err != nil {
			return err
		}
		if _, err := io.Copy(out, spool); err != nil {
			return fmt.Errorf("print: %w", err)
		}
		return nil
	}
	// Windows does not rename open files.
	if err := errors.Join(spool.Sync(), spool.Close()); err != nil {
		return err
	}
	if err := os.Rename(spool.Name(), target); err != nil {
		return fmt.Errorf("--output: %w", err)
	}
	b.say("Wrote %s", target)
	return nil
}

const fleetGroup, clusterGroup = "Fleet", "Cluster"

// collect reads everything. What cannot be read is in the archive's index.
func (b *bugreport) collect(ctx context.Context, f *fleet.Fleet, a *archive) reportIndex {
	ctx, cancel := context.WithTimeoutCause(ctx, maxReportTime, fmt.Errorf("the bug report has taken %v", maxReportTime))
	defer cancel()
	a.begin(fleetGroup)
	a.begin(clusterGroup)
	b.say("Asking the servers")
	answers, all, err := ask(ctx, f, func(ctx context.Context, conn *grpc.ClientConn) (agents, error) {
		return listAgents(ctx, conn, &pb.ListAgentsRequest{})
	})
	var nodes *nodesReport
	if err == nil {
		nodes, err = nodesOf(ctx, f, answers, all)
	}
	if err != nil {
		a.add(fleetGroup, "", "servers", nil, err)
		nodes = &nodesReport{}
	}
	var found []*fleet.Server
	for _, x := range answers {
		found = append(found, x.Server)
	}
	pods, err := f.Agents(ctx, found)
	if err != nil {
		a.add(fleetGroup, "", "agents' Pods", nil, err)
	}
	if len(nodes.nodes) == 0 { // without servers, there are agents nevertheless
		nodes.addPods(pods)
	}
	// The values of all environments are known before the first log is written.
	for _, s := range found {
		_, _ = a.redact.YAML(s.Pod, s.Container)
	}
	for _, p := range pods {
		_, _ = a.redact.YAML(p.Pod, p.Container)
	}
	b.fleetParts(ctx, f, a, answers, all, nodes)
	b.clusterParts(ctx, f, a, found, pods)
	sampled, text := b.choose(nodes.nodes)
	b.say("%s", text)
	var parts errgroup.Group
	parts.SetLimit(parallelParts)
	for _, x := range answers {
		a.begin(serverGroup(x.Server))
	}
	for _, n := range sampled {
		a.begin(nodeGroup(n.Name))
	}
	// All servers are asked at once: asking some of them ends the connections to the others.
	shards := fleet.Ask(ctx, f, found, func(ctx context.Context, conn *grpc.ClientConn) (*pb.ListShardsResponse, error) {
		return pb.NewDebugServiceClient(conn).ListShards(ctx, &pb.ListShardsRequest{})
	})
	for i, x := range answers {
		parts.Go(func() error { b.serverParts(ctx, f, a, x, shards[i]); return nil })
	}
	for _, n := range sampled {
		parts.Go(func() error { b.nodeParts(ctx, f, a, n.Name, pods); return nil })
	}
	_ = parts.Wait() // what has failed is in the index
	return reportIndex{Sampled: text, Nodes: sampled}
}

// fleetParts adds what the other commands show.
func (b *bugreport) fleetParts(
	ctx context.Context, f *fleet.Fleet, a *archive, answers []fleet.Answer[agents], all servers, nodes *nodesReport,
) {
	// What is missing there is in these reports, and in the exit code.
	for i, s := range all {
		if s.Error != "" {
			a.add(serverGroup(answers[i].Server), "", "answer", nil, errors.New(s.Error))
		}
	}
	type named struct {
		name, title string
		report      report
	}
	reports := []named{
		{"status", "Servers and problems", statusOf(answers, all)},
		{"nodes", "Nodes", nodes},
		{"changes", "Latest changes", &changesReport{servers: all, changes: mergeChanges(statuses(answers))}},
	}
	if len(answers) == 0 {
		reports = nil
	}
	b.say("Checking the cluster")
	checked, err := check(ctx, f, false)
	if err != nil {
		a.add(fleetGroup, "", "check", nil, err)
	} else {
		reports = append(reports, named{"check", "Checks", checked})
	}
	for _, r := range reports {
		for _, output := range []string{"wide", "json"} {
			text, err := (&show.Options{Output: output, Wide: true}).Render(ctx, func(context.Context) (show.Report, error) { return r.report, nil })
			file, title := r.name+".txt", r.title
			if output == "json" {
				file, title = r.name+".json", r.title+", JSON"
			}
			a.add(fleetGroup, "fleet/"+file, title, text, err)
		}
	}
}

func serverGroup(s *fleet.Server) string {
	if s.Relay {
		return "Relay " + s.String()
	}
	return "Server " + s.String()
}

func nodeGroup(name string) string { return "Node " + name }

// serverParts adds what is known of a server.
func (b *bugreport) serverParts(
	ctx context.Context, f *fleet.Fleet, a *archive, x fleet.Answer[agents], shards fleet.Answer[*pb.ListShardsResponse],
) {
	s := x.Server
	b.say("Reading %s", s)
	group, dir := serverGroup(s), "servers/"+fileName(s.Namespace)+"/"+fileName(s.Name)+"/"
	if x.Err == nil {
		status, err := json.MarshalIndent(show.Message{Message: x.Value.status}, "", "  ")
		a.add(group, dir+"status.json", "Status and latest changes", status, err)
		var clients bytes.Buffer
		for _, c := range x.Value.clients {
			line, failed := json.Marshal(show.Message{Message: c})
			err = cmp.Or(err, failed)
			clients.Write(append(line, '\n'))
		}
		a.add(group, dir+"clients.jsonl", "Clients, one a line", clients.Bytes(), err)
		text, err := json.MarshalIndent(show.Message{Message: shards.Value}, "", "  ")
		if shards.Err != nil {
			text, err = nil, shards.Err
		}
		a.add(group, dir+"shards.json", "Shards and their digests", text, err)
	}
	metrics, err := f.Metrics(ctx, s, maxReportPart)
	a.add(group, dir+"metrics.txt", "Metrics", metrics, err)
	b.podParts(ctx, f, a, group, dir, s.Pod, s.Container)
}

// podParts adds a Pod and its logs.
func (b *bugreport) podParts(ctx context.Context, f *fleet.Fleet, a *archive, group, dir string, pod *corev1.Pod, container string) {
	text, err := a.redact.YAML(pod, container)
	a.addWithoutSecrets(group, dir+"pod.yaml", "Pod, with its flags", string(text), err)
	name := types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
	log, err := f.Log(ctx, name, container, false, b.since, maxReportPart)
	a.add(group, dir+"log.txt", "Log", log, err)
	restarted := slices.ContainsFunc(pod.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool {
		return s.Name == container && s.RestartCount > 0
	})
	if restarted {
		log, err := f.Log(ctx, name, container, true, b.since, maxReportPart)
		a.add(group, dir+"log-previous.txt", "Log before the restart", log, err)
	}
}

// inspected is a part of what slicecast-agent inspect prints.
type inspected struct {
	Name, Content, Error string
	Truncated            bool
}

// nodeParts adds what is known of a node and its agent.
func (b *bugreport) nodeParts(ctx context.Context, f *fleet.Fleet, a *archive, node string, pods []*fleet.Agent) {
	b.say("Reading node %s", node)
	group, dir := nodeGroup(node), "nodes/"+fileName(node)+"/"
	agent, missing := fleet.AgentOn(pods, node)
	if agent == nil {
		a.add(group, "", "agent", nil, missing)
		return
	}
	b.podParts(ctx, f, a, group, dir, agent.Pod, agent.Container)
	if missing != nil {
		a.add(group, "", "agent's status, rules and kernel", nil, missing)
		return
	}
	status, err := fleet.Within(ctx, f, func(ctx context.Context) ([]byte, error) {
		return f.Run(ctx, agent.NamespacedName, agent.Container, fleet.MaxOutput, nil, "slicecast-agent", "status", "--shards", "--output=json")
	})
	a.add(group, dir+"status.json", "Agent's status", status, err)
	ctx, cancel := context.WithTimeoutCause(ctx, inspectTime, hangs(agent, inspectTime.String()))
	defer cancel()
	answer, err := f.Run(ctx, agent.NamespacedName, agent.Container, maxInspected, nil, "slicecast-agent", "inspect")
	// A command that has failed, or that has not ended in time, may have printed parts nevertheless.
	parts, cut := readInspected(answer)
	if err = cmp.Or(err, cut); err != nil {
		a.add(group, "", "rules and kernel", nil, err)
	}
	for _, p := range parts {
		var err error
		switch {
		case p.Error != "":
			err = errors.New(p.Error)
		case p.Truncated:
			err = errors.New("cut off, because it is too long")
		}
		a.add(group, dir+p.path(), p.Name, []byte(p.Content), err)
	}
}

// path returns the part's path below the node's folder. The node chooses the part's name, which
// must not be that of a file that the API server has said.
func (p inspected) path() string {
	if folder, file, _ := strings.Cut(p.Name, "/"); slices.Contains([]string{"agent", "kernel", "rules"}, folder) {
		return folder + "/" + fileName(file)
	}
	return "other/" + fileName(p.Name)
}

// maxInspectedParts bounds how many parts are accepted.
const maxInspectedParts = 100

// readInspected returns the parts in what slicecast-agent inspect has printed. If it cannot read
// the rest, it returns an error, too.
func readInspected(answer []byte) (parts []inspected, err error) {
	for decoder := json.NewDecoder(bytes.NewReader(answer)); len(parts) < maxInspectedParts; {
		var p inspected
		switch err := decoder.Decode(&p); {
		case errors.Is(err, io.EOF):
			return parts, nil
		case errors.Is(err, io.ErrUnexpectedEOF):
			return parts, errors.New("what slicecast-agent inspect has printed is cut off")
		case err != nil:
			return parts, fmt.Errorf("what slicecast-agent inspect has printed is of another version: %w; upgrade what is older", err)
		}
		if !slices.ContainsFunc(parts, func(q inspected) bool { return q.path() == p.path() }) {
			parts = append(parts, p)
		}
	}
	return parts, fmt.Errorf("slicecast-agent inspect has printed more than %d parts", maxInspectedParts)
}
