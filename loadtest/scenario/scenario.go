// Package scenario defines what a load test plays: the shape of a cluster, what changes in it and
// how fast, and what happens to nodes and servers meanwhile. A scenario is a flat list of
// parameters. Each parameter is a flag of the command and, under the same name, a key of a YAML
// file. The scenarios that come with the program are such files. The course of a run depends only
// on the parameters, which include a seed.
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

// Event is something that happens to nodes or servers while the state changes.
type Event string

// Supported events.
const (
	// None means that there is no event.
	None Event = "none"
	// Reconnect cuts the connections of all nodes at once.
	Reconnect Event = "reconnect"
	// Restart kills a server and starts it again with the state of that moment. If there are
	// relays, it restarts a relay instead.
	Restart Event = "restart"
	// Failover kills a server for good. There must be another server. If there are relays, it kills
	// a relay instead, and there must be another relay.
	Failover Event = "failover"
)

// Default is the scenario that is played if none is named.
const Default = "steady"

// maxFile is the maximum size of a file, in bytes.
const maxFile = 1 << 20

//go:embed shipped/*.yaml
var shipped embed.FS

// Scenario is what a load test plays. Apart from Name and Description, each field is the parameter
// of the flag that AddFlags binds to it.
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

// AddFlags sets the parameters to their defaults and adds their flags.
func (s *Scenario) AddFlags(f *pflag.FlagSet) {
	*s = Scenario{
		Services: Groups{{Count: 1000, Least: 50, Most: 50}}, Changing: Groups{{Count: 1, Least: 5000, Most: 5000}},
	}
	f.IntVar(&s.Nodes, "nodes", 100, "number of simulated nodes")
	f.Var(&s.Services, "services",
		"Services whose endpoints do not change, as COUNTxENDPOINTS or COUNTxLEAST-MOST groups, such as 1000x50,10x100-500; \"\" for none")
	f.Var(&s.Changing, "changing", "Services whose endpoints change, in the same form; if \"\", those of --services change")
	f.Uint64Var(&s.Seed, "seed", 1, "seed for the placement of endpoints, the order of changes and, with --arrivals=poisson, their times")

	f.StringVar((*string)(&s.Change), "change", string(generate.Flip), "what changes: flip (readiness of an "+
		"endpoint), roll (all pods are replaced), drain (pods move off drained nodes), "+
		"scale (Services start without pods and get all of them), none")
	f.Float64Var(&s.Rate, "rate", 5, "endpoints that flip, pods that are added or replaced, or nodes that are drained, per second")
	f.StringVar((*string)(&s.Arrivals), "arrivals", string(generate.Even), "distribution of --rate over time: even "+
		"(equal intervals), poisson (random, with that average)")
	f.IntVar(&s.Batch, "batch", 1, "for roll and scale: number of pods in one sync of the EndpointSlice controller")
	f.DurationVar(&s.Grace, "grace", 2*time.Second, "for roll and drain: how long a pod terminates")
	f.DurationVar(&s.Duration, "duration", time.Minute, "how long to flip or drain, or to observe if others make "+
		"the changes; roll and scale end by themselves")
	f.DurationVar(&s.WarmUp, "warm-up", 5*time.Second, "how long endpoints flip before the measurement")

	f.StringVar((*string)(&s.Event), "event", string(None), "what happens during the changes: reconnect (all connections are cut), "+
		"restart (a server is killed and restarted), failover (a server is killed), none")
	f.DurationVar(&s.At, "at", 5*time.Second, "when --event happens, counted from the first measured change or, "+
		"without changes, from when all nodes are in sync")

	f.IntVar(&s.Servers, "servers", 1, "number of servers to start")
	f.IntVar(&s.Relays, "relays", 0, "number of relays to start, which then serve the nodes")
	f.IntVar(&s.Connecting, "connecting", 32, "number of nodes that connect and receive their first state at the same time; 0 for all")
	f.IntVar(&s.SlowPercent, "slow-percent", 0, "percentage of nodes that are slow")
	f.DurationVar(&s.SlowDelay, "slow-delay", time.Second, "how long a slow node pauses each time before it reads what has arrived")
	f.BoolVar(&s.GRPCGo, "grpc-go", false,
		"for comparison: nodes do not offer the agents' protocol in TLS, so grpc-go serves them instead of the server's own HTTP/2")
	f.BoolVar(&s.Floor, "floor", false,
		"at the end, measure what the same connections, bytes and writes cost the server over TLS alone")
}

// Load loads a scenario: from a file if name ends with .yaml, otherwise the scenario of that name
// that comes with the program. Flags that were set on the command line override the parameters of
// the scenario. Flags in given that are not parameters are ignored.
func Load(name string, given *pflag.FlagSet) (*Scenario, error) {
	var content []byte
	var err error
	if strings.HasSuffix(name, ".yaml") {
		content, err = readFile(name)
	} else if content, err = shipped.ReadFile("shipped/" + name + ".yaml"); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("there is no scenario %q: use one of %s, or the path of a file that ends with .yaml",
			name, strings.Join(Names(), ", "))
	}
	if err != nil {
		return nil, fmt.Errorf("scenario: %w", err)
	}
	s, f, err := parse(content)
	if err != nil {
		return nil, fmt.Errorf("scenario %s: %w", name, err)
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
		return nil, fmt.Errorf("scenario %s: %w", name, err)
	}
	return s, nil
}

func readFile(name string) ([]byte, error) {
	info, err := os.Stat(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxFile {
		return nil, fmt.Errorf("%s is not a regular file of at most %d bytes", name, maxFile)
	}
	return os.ReadFile(name)
}

// Names returns the names of the scenarios that come with the program.
func Names() (names []string) {
	entries, _ := shipped.ReadDir("shipped") // an embedded folder is always readable
	for _, e := range entries {
		names = append(names, strings.TrimSuffix(e.Name(), ".yaml"))
	}
	return names
}

// parse parses a file: a mapping of parameters to values, and a description. Its errors name the
// line and the key.
func parse(content []byte) (*Scenario, *pflag.FlagSet, error) {
	s, f := &Scenario{}, pflag.NewFlagSet("", pflag.ContinueOnError)
	s.AddFlags(f)
	var document, more yaml.Node
	decoder := yaml.NewDecoder(bytes.NewReader(content))
	if err := decoder.Decode(&document); err != nil && !errors.Is(err, io.EOF) {
		return nil, nil, err
	}
	if err := decoder.Decode(&more); !errors.Is(err, io.EOF) {
		return nil, nil, errors.Join(errors.New("the file has more than one document: use one file for each scenario"), err)
	}
	if len(document.Content) != 1 || document.Content[0].Kind != yaml.MappingNode {
		return nil, nil, errors.New("the file must be a mapping of parameters to values: see --help for the parameters")
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
			return nil, nil, wrong("is set twice")
		case key == "description":
			s.Description = strings.TrimSpace(value.Value)
		case f.Lookup(key) == nil:
			return nil, nil, wrong("is not a parameter: use description or %s", strings.Join(slices.Sorted(maps.Keys(s.Parameters())), ", "))
		default:
			if err := f.Set(key, value.Value); err != nil {
				return nil, nil, wrong("is %q: %w", value.Value, errors.Unwrap(err))
			}
		}
		seen[key] = true
	}
	return s, f, nil
}

// Parameters returns all parameters by name, in the form that a file has.
func (s *Scenario) Parameters() map[string]any {
	return map[string]any{
		"nodes": s.Nodes, "services": s.Services.String(), "changing": s.Changing.String(), "seed": s.Seed,
		"change": string(s.Change), "rate": s.Rate, "arrivals": string(s.Arrivals), "batch": s.Batch, "grace": s.Grace.String(), "duration": s.Duration.String(),
		"warm-up": s.WarmUp.String(), "event": string(s.Event), "at": s.At.String(), "servers": s.Servers, "relays": s.Relays,
		"connecting": s.Connecting, "slow-percent": s.SlowPercent, "slow-delay": s.SlowDelay.String(), "grpc-go": s.GRPCGo, "floor": s.Floor,
	}
}

// Mistakes are the errors in options.
type Mistakes []error

// When adds an error if a condition holds.
func (m *Mistakes) When(is bool, format string, args ...any) {
	if is {
		*m = append(*m, fmt.Errorf(format, args...))
	}
}

// Validate returns all errors in the parameters.
func (s *Scenario) Validate() error {
	var wrong Mistakes
	kinds := []generate.Kind{generate.Flip, generate.Roll, generate.Drain, generate.Scale, generate.None}
	events := []Event{None, Reconnect, Restart, Failover}
	wrong.When(s.Nodes < 1, "nodes is %d: use at least 1", s.Nodes)
	wrong.When(!slices.Contains(kinds, s.Change), "change is %q: use flip, roll, drain, scale or none", s.Change)
	wrong.When(!slices.Contains(events, s.Event), "event is %q: use reconnect, restart, failover or none", s.Event)
	wrong.When(s.Change != generate.None && !(s.Rate > 0 && s.Rate <= maxRate),
		"rate is %g: use a positive number up to %g, or change: none", s.Rate, maxRate)
	wrong.When(s.Arrivals != generate.Even && s.Arrivals != generate.Poisson, "arrivals is %q: use even or poisson", s.Arrivals)
	wrong.When(s.Batch < 1, "batch is %d: use at least 1", s.Batch)
	wrong.When(s.Grace < 0, "grace is %v: use 0 or more", s.Grace)
	wrong.When(s.Duration <= 0, "duration is %v: use a positive duration", s.Duration)
	wrong.When(s.WarmUp < 0, "warm-up is %v: use 0 or more", s.WarmUp)
	wrong.When(s.At < 0, "at is %v: use 0 or more", s.At)
	if end := s.end(); s.Event != None && s.Change != generate.None && s.At > end {
		wrong.When(true, "at is %v, but the changes end after %v: use at most that", s.At, end)
	}
	wrong.When(s.Servers < 1, "servers is %d: use at least 1", s.Servers)
	wrong.When(s.Relays < 0, "relays is %d: use 0 or more", s.Relays)
	wrong.When(s.Event == Failover && s.Relays == 0 && s.Servers < 2 || s.Event == Failover && s.Relays == 1,
		"event is failover, but nodes have only one server or relay: use at least 2")
	wrong.When(s.Connecting < 0, "connecting is %d: use 0 (all at once) or more", s.Connecting)
	wrong.When(s.SlowPercent < 0 || s.SlowPercent >= 100, "slow-percent is %d: use 0 to 99", s.SlowPercent)
	wrong.When(s.SlowDelay <= 0, "slow-delay is %v: use a positive duration", s.SlowDelay)
	wrong.When(s.Floor && s.Relays > 0, "floor requires that a server serves the nodes itself: leave relays out")
	return errors.Join(append(wrong, s.Cluster().Validate())...)
}

// maxRate is a rate beyond that of any machine.
const maxRate = 1e6

// Cluster returns the configuration that determines the state.
func (s *Scenario) Cluster() generate.Config {
	return generate.Config{Nodes: s.Nodes, Services: s.Services, Changing: s.Changing, Seed: s.Seed, Change: s.Change}
}

// warmUpRate is the number of flips per second in a warm-up before changes that are not flips.
const warmUpRate = 5

// WarmUpPlan returns the changes before those that are measured. Its Count may be 0.
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

// Plan returns the changes that are measured.
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

// end returns the average time from the first change until the last.
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

// Slow reports whether a node is slow. The slow nodes are spread evenly over all nodes.
func (s *Scenario) Slow(node int) bool { return (node+1)*s.SlowPercent/100 > node*s.SlowPercent/100 }
