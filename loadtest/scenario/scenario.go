// Package scenario says what a load test plays: the shape of a cluster, what changes in it and how fast, and what befalls its
// nodes and servers meanwhile. A scenario is a flat list of parameters, each of which is a flag of the command and a key of a
// YAML file by the same name; the scenarios that come with the program are such files. What a run does follows from the
// parameters and their seed alone.
package scenario

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/slicecast/slicecast/loadtest/generate"
)

// Event is what befalls nodes and servers while the state changes.
type Event string

// The events.
const (
	// None: nothing.
	None Event = "none"
	// Reconnect cuts the connections of all nodes at once.
	Reconnect Event = "reconnect"
	// Restart kills a server and starts it again with the state as it is by then.
	Restart Event = "restart"
	// Failover kills a server for good; there must be another one. With relays it, like Restart, is about one of these.
	Failover Event = "failover"
)

// Default is the scenario that is played if none is named.
const Default = "steady"

// descriptionKey is the one key of files that is no parameter.
const descriptionKey = "description"

// maxFile is the most that is read of a file.
const maxFile = 1 << 20

//go:embed shipped/*.yaml
var shipped embed.FS

// Scenario is what a load test plays.
type Scenario struct {
	Name, Description string

	Nodes    int
	Services Groups
	Changing Groups
	Seed     uint64

	Change   generate.Kind
	Rate     float64
	Arrivals generate.Arrivals
	Batch    int
	Grace    time.Duration
	Duration time.Duration
	WarmUp   time.Duration

	Event Event
	At    time.Duration

	Servers     int
	Relays      int
	Connecting  int
	SlowPercent int
	SlowDelay   time.Duration
	GRPCGo      bool
	Floor       bool
}

// AddFlags adds the parameters, with their defaults.
func (s *Scenario) AddFlags(f *pflag.FlagSet) {
	*s = Scenario{
		Services: Groups{{Count: 1000, Least: 50, Most: 50}}, Changing: Groups{{Count: 1, Least: 5000, Most: 5000}}, Change: generate.Flip,
		Arrivals: generate.Even, Event: None,
	}
	f.IntVar(&s.Nodes, "nodes", 100, "simulated nodes")
	f.Var(&s.Services, "services",
		"Services whose endpoints stay, as COUNTxENDPOINTS groups: 1000x50,10x100-500 are 1000 with 50 and 10 with 100 to 500 each; \"\": none")
	f.Var(&s.Changing, "changing", "more Services, in the same form: those whose endpoints change; \"\": --services change")
	f.Uint64Var(&s.Seed, "seed", 1, "of where endpoints are, of the order in which they change, and of when with --arrivals=poisson")

	f.Var((*choice)(&s.Change), "change", "what changes: flip (an endpoint's readiness), roll (all pods of the Services are replaced), "+
		"drain (nodes lose their pods to others), scale (the Services begin without endpoints and get all of them), none")
	f.Float64Var(&s.Rate, "rate", 5, "endpoints that flip, pods that are replaced or come, or nodes that are drained, in a second")
	f.Var((*choice)(&s.Arrivals), "arrivals", "how --rate is distributed over time: even (at equal intervals), poisson (at random, at that rate on average)")
	f.IntVar(&s.Batch, "batch", 1, "for roll and scale: pods that one sync of the EndpointSlice controller takes in")
	f.DurationVar(&s.Grace, "grace", 2*time.Second, "for roll and drain: how long a pod is terminating")
	f.DurationVar(&s.Duration, "duration", time.Minute, "how long to flip or drain, or, without changes of the run's own, to observe; roll and scale end by themselves")
	f.DurationVar(&s.WarmUp, "warm-up", 5*time.Second, "how long endpoints flip before what is measured")

	f.Var((*choice)(&s.Event), "event", "what happens meanwhile: reconnect (all connections are cut), restart (a server is killed and started again), "+
		"failover (a server is killed), none")
	f.DurationVar(&s.At, "at", 5*time.Second, "when --event happens, from the first measured change on or, without changes, from when all nodes are in sync")

	f.IntVar(&s.Servers, "servers", 1, "servers that are started")
	f.IntVar(&s.Relays, "relays", 0, "relays that are started, which then serve the nodes")
	f.IntVar(&s.Connecting, "connecting", 32, "nodes that connect and get their first state at the same time; 0: all at once")
	f.IntVar(&s.SlowPercent, "slow-percent", 0, "share of the nodes that are slow")
	f.DurationVar(&s.SlowDelay, "slow-delay", time.Second, "how long a slow node does not read, before it reads what has come, and so on")
	f.BoolVar(&s.GRPCGo, "grpc-go", false,
		"for comparison: nodes do not offer the agents' protocol in TLS, so that grpc-go serves them instead of the server's own HTTP/2")
	f.BoolVar(&s.Floor, "floor", false,
		"after all, measure what the server's process pays for as many connections, bytes and writes over TLS and nothing else")
}

// choice is one of a few words; Validate knows them.
type choice string

// String implements pflag.Value.
func (c *choice) String() string { return string(*c) }

// Set implements pflag.Value.
func (c *choice) Set(v string) error { *c = choice(v); return nil }

// Type implements pflag.Value.
func (*choice) Type() string { return "string" }

// parameters gives a scenario with its defaults, and the flags that set it.
func parameters() (*Scenario, *pflag.FlagSet) {
	s := &Scenario{}
	f := pflag.NewFlagSet("", pflag.ContinueOnError)
	s.AddFlags(f)
	return s, f
}

// Load gives a scenario: one that comes with the program, by its name, or one from a file, by a path that ends with .yaml.
// Flags that were given on the command line replace what it says; those that are no parameters are passed over.
func Load(name string, given *pflag.FlagSet) (*Scenario, error) {
	var content []byte
	var err error
	file := name
	if strings.HasSuffix(name, ".yaml") {
		content, err = readFile(name)
	} else if content, err = shipped.ReadFile("shipped/" + name + ".yaml"); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("there is no scenario %q: use one of %s, or the path of a file that ends with .yaml", name, strings.Join(Names(), ", "))
	}
	if err != nil {
		return nil, fmt.Errorf("scenario: %w", err)
	}
	s, f, err := parse(content)
	if err != nil {
		return nil, fmt.Errorf("scenario %s: %w", file, err)
	}
	s.Name = strings.TrimSuffix(path.Base(name), ".yaml")
	if given != nil {
		var replaced []string
		given.Visit(func(flag *pflag.Flag) {
			own := f.Lookup(flag.Name)
			if own == nil || err != nil || own.Value.String() == flag.Value.String() {
				return
			}
			replaced = append(replaced, fmt.Sprintf("--%s=%s", flag.Name, flag.Value))
			err = f.Set(flag.Name, flag.Value.String())
		})
		if err != nil {
			return nil, err
		}
		if s.Description != "" && len(replaced) > 0 {
			s.Description += " Here with " + strings.Join(replaced, " ") + "."
		}
	}
	if err := s.Validate(); err != nil {
		return nil, fmt.Errorf("scenario %s: %w", file, err)
	}
	return s, nil
}

func readFile(name string) ([]byte, error) {
	info, err := os.Stat(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxFile {
		return nil, fmt.Errorf("%s is no regular file of at most %d bytes", name, maxFile)
	}
	return os.ReadFile(name)
}

// Names lists the scenarios that come with the program.
func Names() (names []string) {
	entries, _ := shipped.ReadDir("shipped") // it is there
	for _, e := range entries {
		names = append(names, strings.TrimSuffix(e.Name(), ".yaml"))
	}
	return names
}

// parse reads a file: a mapping of parameters to values, and a description. Errors name line and key.
func parse(content []byte) (*Scenario, *pflag.FlagSet, error) {
	s, f := parameters()
	var document, more yaml.Node
	decoder := yaml.NewDecoder(bytes.NewReader(content))
	if err := decoder.Decode(&document); err != nil && !errors.Is(err, io.EOF) {
		return nil, nil, err
	}
	if err := decoder.Decode(&more); !errors.Is(err, io.EOF) {
		return nil, nil, errors.Join(errors.New("there is more than one document: have one scenario in a file"), err)
	}
	if len(document.Content) != 1 || document.Content[0].Kind != yaml.MappingNode {
		return nil, nil, errors.New("it must be a mapping of parameters to values, one in a line: see --help for what there is")
	}
	seen := make(map[string]bool)
	pairs := document.Content[0].Content
	for i := 0; i < len(pairs); i += 2 {
		key, value := pairs[i].Value, pairs[i+1]
		wrong := func(format string, args ...any) error {
			return fmt.Errorf("line %d: %s "+format, append([]any{pairs[i].Line, key}, args...)...)
		}
		switch {
		case value.Kind != yaml.ScalarNode:
			return nil, nil, wrong("must have a single value")
		case seen[key]:
			return nil, nil, wrong("is there twice")
		case key == descriptionKey:
			s.Description = strings.TrimSpace(value.Value)
		case f.Lookup(key) == nil:
			return nil, nil, wrong("is no parameter: use %s or %s", descriptionKey, strings.Join(slices.Sorted(maps.Keys(s.Parameters())), ", "))
		default:
			if err := f.Set(key, value.Value); err != nil {
				return nil, nil, wrong("is %q: %w", value.Value, errors.Unwrap(err))
			}
		}
		seen[key] = true
	}
	return s, f, nil
}

// Parameters gives all parameters by their names, as a file would have them.
func (s *Scenario) Parameters() map[string]any {
	return map[string]any{
		"nodes": s.Nodes, "services": s.Services.String(), "changing": s.Changing.String(), "seed": s.Seed,
		"change": string(s.Change), "rate": s.Rate, "arrivals": string(s.Arrivals), "batch": s.Batch, "grace": s.Grace.String(), "duration": s.Duration.String(),
		"warm-up": s.WarmUp.String(), "event": string(s.Event), "at": s.At.String(), "servers": s.Servers, "relays": s.Relays,
		"connecting": s.Connecting, "slow-percent": s.SlowPercent, "slow-delay": s.SlowDelay.String(), "grpc-go": s.GRPCGo, "floor": s.Floor,
	}
}

// Validate finds all that is wrong.
func (s *Scenario) Validate() error {
	var errs []error
	wrong := func(is bool, format string, args ...any) {
		if is {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	kinds := []generate.Kind{generate.Flip, generate.Roll, generate.Drain, generate.Scale, generate.None}
	events := []Event{None, Reconnect, Restart, Failover}
	wrong(s.Nodes < 1, "nodes is %d: use at least 1", s.Nodes)
	wrong(!slices.Contains(kinds, s.Change), "change is %q: use flip, roll, drain, scale or none", s.Change)
	wrong(!slices.Contains(events, s.Event), "event is %q: use reconnect, restart, failover or none", s.Event)
	wrong(s.Change != generate.None && !(s.Rate > 0 && s.Rate <= maxRate), "rate is %g: use a positive number up to %g, or change: none", s.Rate, maxRate)
	wrong(s.Arrivals != generate.Even && s.Arrivals != generate.Poisson, "arrivals is %q: use even or poisson", s.Arrivals)
	wrong(s.Batch < 1, "batch is %d: use at least 1", s.Batch)
	wrong(s.Grace < 0, "grace is %v: use 0 or more", s.Grace)
	wrong(s.Duration <= 0, "duration is %v: use a positive duration", s.Duration)
	wrong(s.WarmUp < 0, "warm-up is %v: use 0 or more", s.WarmUp)
	wrong(s.At < 0, "at is %v: use 0 or more", s.At)
	if end := s.end(); s.Event != None && s.Change != generate.None && s.At > end {
		wrong(true, "at is %v, and the changes end after %v: use no more than that", s.At, end)
	}
	wrong(s.Servers < 1, "servers is %d: use at least 1", s.Servers)
	wrong(s.Relays < 0, "relays is %d: use 0 or more", s.Relays)
	wrong(s.Event == Failover && s.Relays == 0 && s.Servers < 2 || s.Event == Failover && s.Relays == 1,
		"event is failover, and nodes have only one server or relay: use at least 2")
	wrong(s.Connecting < 0, "connecting is %d: use 0 (all at once) or more", s.Connecting)
	wrong(s.SlowPercent < 0 || s.SlowPercent >= 100, "slow-percent is %d: use 0 to 99", s.SlowPercent)
	wrong(s.SlowDelay <= 0, "slow-delay is %v: use a positive duration", s.SlowDelay)
	wrong(s.Floor && s.Relays > 0, "floor is about a server that serves the nodes itself: leave relays out")
	if err := s.Cluster().Validate(); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// maxRate is more than any machine does.
const maxRate = 1e6

// Cluster is what the state follows from.
func (s *Scenario) Cluster() generate.Config {
	return generate.Config{Nodes: s.Nodes, Services: s.Services, Changing: s.Changing, Seed: s.Seed, Change: s.Change}
}

// warmUpRate is how many endpoints flip in a second before something else than flips is measured.
const warmUpRate = 5

// WarmUpPlan gives the changes before those that are measured; its Count may be 0.
func (s *Scenario) WarmUpPlan(start time.Time) generate.Plan {
	rate := s.Rate
	if s.Change != generate.Flip {
		rate = warmUpRate
	}
	if s.Change == generate.None {
		rate = 0
	}
	p := generate.Plan{Kind: generate.Flip, Schedule: s.schedule(start, rate)}
	p.Count = int(rate * s.WarmUp.Seconds())
	return p
}

// Plan gives the changes that are measured.
func (s *Scenario) Plan(start time.Time) generate.Plan {
	p := generate.Plan{Kind: s.Change, Schedule: s.schedule(start, s.Rate), Batch: s.Batch, Grace: s.Grace}
	if s.Change == generate.Flip || s.Change == generate.Drain {
		p.Count = max(1, int(s.Rate*s.Duration.Seconds()))
	}
	return p
}

func (s *Scenario) schedule(start time.Time, rate float64) generate.Schedule {
	return generate.Schedule{Start: start, Rate: rate, Arrivals: s.Arrivals, Seed: s.Seed}
}

// end is how long the changes are made, from the first on, on average.
func (s *Scenario) end() time.Duration {
	if s.Change != generate.Roll && s.Change != generate.Scale {
		return s.Duration
	}
	changing := s.Changing
	if len(changing) == 0 {
		changing = s.Services
	}
	pods := 0
	for _, g := range changing {
		pods += g.Count * g.Most
	}
	return s.Plan(time.Time{}).After(pods)
}

// Slow tells whether a node is one of the slow ones, which are spread evenly.
func (s *Scenario) Slow(node int) bool { return (node+1)*s.SlowPercent/100 > node*s.SlowPercent/100 }
