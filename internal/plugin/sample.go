package plugin

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/internal/show"
)

// sampledNode is a node that a bug report or connectivity looks at.
type sampledNode struct{ Name, State, Why string }

// Why nodes are chosen, the most important reason first.
const (
	becauseNamed   = "it was asked for"
	becauseBehind  = "it is not connected or behind"
	becauseErrors  = "it cannot program something"
	becauseWarning = "it has a warning"
	becauseRandom  = "at random"
)

// choose returns the nodes to look at, and a sentence about the choice.
func (b *bugreport) choose(nodes []node) (chosen []sampledNode, text string) {
	return choose(nodes, b.nodes, b.sample, b.seed)
}

// choose returns the nodes with these names or, without names, a sample, and a sentence about the
// choice. With the same seed it chooses the same ones, if the fleet is the same. A seed of 0 means
// a new one.
func choose(nodes []node, names []string, sample int, seed uint64) (chosen []sampledNode, text string) {
	if len(names) > 0 {
		for _, name := range names {
			n := sampledNode{Name: name, State: "no such node", Why: becauseNamed}
			if i := slices.IndexFunc(nodes, func(n node) bool { return n.Node == name }); i >= 0 {
				n.State = nodes[i].State
			}
			if !slices.Contains(chosen, n) {
				chosen = append(chosen, n)
			}
		}
		return chosen, "These nodes were asked for: " + strings.Join(names, ", ") + "."
	}
	if seed == 0 {
		seed = rand.Uint64()
	}
	random := rand.New(rand.NewPCG(seed, 0))
	var by [4][]sampledNode
	for _, i := range random.Perm(len(nodes)) {
		n, rank, why := nodes[i], 3, becauseRandom
		switch {
		case n.behind():
			rank, why = 0, becauseBehind
		case len(n.agent.GetErrors()) > 0:
			rank, why = 1, becauseErrors
		case len(n.agent.GetWarnings()) > 0:
			rank, why = 2, becauseWarning
		}
		by[rank] = append(by[rank], sampledNode{n.Node, n.State, why})
	}
	all := slices.Concat(by[:]...)
	chosen = all[:min(sample, len(all))]
	text = fmt.Sprintf("%d of %s: those in trouble first, then random ones (--seed=%d).", len(chosen), show.Plural("node", len(nodes)), seed)
	return chosen, text
}
