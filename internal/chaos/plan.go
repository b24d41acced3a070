package chaos

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// Step is a fault at its time.
type Step struct {
	// At is the time from the begin of the plan.
	At time.Duration
	// Fault is the name of one of [Faults].
	Fault string
	// Target is what the fault hits: a node, or a server, by its number modulo how many there are.
	Target int
	// Lasts is the time between the fault's begin and its end. Faults without an end, such as a
	// process that is killed, are observed for this time.
	Lasts time.Duration
}

// Action is what a Change does.
type Action string

// The actions.
const (
	Scale  Action = "scale"  // the Deployment gets Value replicas
	Roll   Action = "roll"   // the Deployment's Pods are replaced
	Create Action = "create" // a Service without Pods appears, with Value endpoints in a slice
	Move   Action = "move"   // the slice of such a Service gets Value endpoints
	Delete Action = "delete" // such a Service goes, and its name does not come back
)

// Change is a change of an object at its time.
type Change struct {
	// At is the time from the begin of the plan.
	At     time.Duration
	Action Action
	// Object is the number of a Deployment or of a Service without Pods.
	Object int
	// Value is the argument of the action.
	Value int
}

// Plan is what happens to a cluster.
type Plan struct {
	Seed     uint64
	Duration time.Duration
	Steps    []Step
	Changes  []Change
}

const (
	// minSlot and maxSlot bound the time from one fault to the next. Between them it is such that
	// each fault has its turn.
	minSlot, maxSlot = 35 * time.Second, 75 * time.Second
	// deployments is the number of Deployments with a Service. The last one never changes.
	deployments = 3
	// minReplicas and maxReplicas bound the Pods of a Deployment that changes.
	minReplicas, maxReplicas = 2, 6
	// maxPaper bounds the Services without Pods at a time, and maxEndpoints the endpoints of each.
	maxPaper, maxEndpoints = 40, 50
)

// NewPlan draws a plan from a seed. It has the named faults, or all if there are no names. Steps
// have a stream of random numbers of their own, so that the choice of faults does not change the
// churn.
func NewPlan(seed uint64, duration time.Duration, names ...string) (Plan, error) {
	known := make([]string, len(Faults))
	for i := range Faults {
		known[i] = Faults[i].Name
	}
	for _, name := range names {
		if !slices.Contains(known, name) {
			return Plan{}, fmt.Errorf("unknown fault %q: choose from %q", name, known)
		}
	}
	if len(names) == 0 {
		names = known
	}
	if duration < minSlot {
		return Plan{}, fmt.Errorf("the duration is %s: use at least %s, the time of one fault", duration, minSlot)
	}
	return Plan{Seed: seed, Duration: duration, Steps: drawSteps(seed, duration, names), Changes: drawChanges(seed, duration)}, nil
}

// drawSteps draws the faults: each has its turn before any comes again.
func drawSteps(seed uint64, duration time.Duration, names []string) []Step {
	random := rand.New(rand.NewPCG(seed, 1))
	slot := min(max(duration/time.Duration(len(names)), minSlot), maxSlot)
	steps := make([]Step, 0, duration/slot)
	var left []string
	for at := slot / 8; at+slot*7/8 <= duration; at += slot {
		if len(left) == 0 {
			left = slices.Clone(names)
			random.Shuffle(len(left), func(i, j int) { left[i], left[j] = left[j], left[i] })
		}
		lasts := slot/4 + time.Duration(random.Int64N(int64(slot/8)))
		steps = append(steps, Step{
			At: at, Fault: left[0], Target: random.IntN(1 << 16), Lasts: lasts.Round(100 * time.Millisecond),
		})
		left = left[1:]
	}
	return steps
}

// drawChanges draws the churn.
func drawChanges(seed uint64, duration time.Duration) []Change {
	random := rand.New(rand.NewPCG(seed, 2))
	var changes []Change
	var paper []int // the Services without Pods
	next := 0
	for at := time.Duration(0); at < duration; at += 2*time.Second + time.Duration(random.Int64N(int64(3*time.Second))) {
		c := Change{At: at.Round(10 * time.Millisecond)}
		switch draw := random.IntN(10); {
		case draw < 2:
			c.Action, c.Object, c.Value = Scale, random.IntN(deployments-1), minReplicas+random.IntN(maxReplicas-minReplicas+1)
		case draw < 3:
			c.Action, c.Object = Roll, random.IntN(deployments-1)
		case draw < 6 && len(paper) < maxPaper || len(paper) == 0:
			c.Action, c.Object, c.Value = Create, next, random.IntN(maxEndpoints+1)
			paper = append(paper, next)
			next++
		case draw < 8:
			c.Action, c.Object, c.Value = Move, paper[random.IntN(len(paper))], random.IntN(maxEndpoints+1)
		default:
			i := random.IntN(len(paper))
			c.Action, c.Object = Delete, paper[i]
			paper = slices.Delete(paper, i, i+1)
		}
		changes = append(changes, c)
	}
	return changes
}
