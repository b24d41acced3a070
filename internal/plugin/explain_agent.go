package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/show"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// nodeAnswer is what is read of what "slicecast-agent explain -o json" prints.
type nodeAnswer struct {
	Served   *bool    `json:"served"`
	Problems []string `json:"problems"`
	Unjudged []string `json:"unjudged"`
	Ports    []struct {
		ID            string `json:"id"`
		EndpointCount int    `json:"endpointCount"`
		Packets       []struct {
			Frontend   string `json:"frontend"`
			Source     string `json:"source"`
			Wanted     string `json:"wanted"`
			Because    string `json:"because"`
			Backends   int    `json:"backends"`
			Found      string `json:"found"`
			Difference string `json:"difference"`
			Deviation  string `json:"deviation"`
			// RefusedBy and DecidedBy are as in explain.Packet.
			RefusedBy []string `json:"refusedBy"`
			DecidedBy string   `json:"decidedBy"`
		} `json:"packets"`
		Flows struct {
			Total int `json:"total"`
			Stale int `json:"stale"`
		} `json:"flows"`
	} `json:"ports"`
}

// askAgent adds the steps of the agent and of the kernel.
func (r *explainReport) askAgent(ctx context.Context, o *explained, answers []fleet.Answer[lacking], run runner) {
	r.agentHas(ctx, answers, run)
	s := r.step("the kernel, compared with the decision")
	if o.service == nil || o.node == nil {
		return // what is missing was said
	}
	command := append([]string{"slicecast-agent", "explain", r.question.name, "--objects=-"}, proxyNameArguments(r.proxyName)...)
	if r.question.from != "" {
		command = append(command, "--from="+r.question.from)
	}
	var a nodeAnswer
	text, err := run(ctx, bytes.NewReader(o.text), append(command, "--output=json")...)
	// The command fails if there are differences, and prints them nevertheless.
	if failed := json.Unmarshal(text, &a); failed != nil || a.Served == nil {
		if err == nil {
			err = fmt.Errorf("the agent has not printed an explanation as JSON, but %.100q: upgrade it", text)
		}
		s.notJudged("%v", err)
		r.verdict = append(r.verdict, "What the kernel does is not known: "+err.Error())
		return
	}
	r.answer = text
	r.judge(s, &a)
	if r.question.output != "table" && r.question.output != "wide" {
		return
	}
	out, err := run(ctx, bytes.NewReader(o.text), append(command, "--output="+r.question.output)...)
	if r.text = string(out); r.text == "" && err != nil {
		s.notJudged("the details: %v", err)
	}
}

// agentHas adds the step of what the agent says that it has.
func (r *explainReport) agentHas(ctx context.Context, answers []fleet.Answer[lacking], run runner) {
	s := r.step("the node's agent")
	text, err := run(ctx, nil, "slicecast-agent", "status", "--output=json")
	var status *pb.AgentDebugServiceGetStatusResponse
	if err == nil {
		status, err = readAgentStatus(text)
	}
	if err != nil {
		s.notJudged("%v", err)
		return
	}
	s.fact("programmer %s; follows %s", status.GetProgrammer(), orNone(status.GetServer().GetName()+status.GetSource()))
	if status.GetByCheckpoint() {
		s.differs("the node is programmed from the checkpoint: no server has confirmed the state since the agent was started")
	}
	if status.GetStaleSince() != nil {
		s.differs("it has been in sync with no server for %s: %s", show.Age(status.GetTime().AsTime().Sub(status.GetStaleSince().AsTime())),
			orNone(status.GetLastError()))
	}
	for _, a := range answers {
		g := a.Value.service
		if a.Err != nil || g == nil || a.Value.status.GetEpoch() != status.GetEpoch() {
			continue
		}
		for _, shard := range status.GetShards() {
			if shard.GetShard() != g.GetShard() {
				continue
			}
			s.fact("shard %d: received up to sequence %d, programmed up to %d", shard.GetShard(), shard.GetSequence(), shard.GetProgrammedSequence())
			if shard.GetProgrammedSequence() < g.GetChangedSequence() {
				r.moving = true
				s.differs("the Service changed at sequence %d, which the node has not programmed yet", g.GetChangedSequence())
				continue
			}
			r.late = false // what is not acknowledged yet is programmed
		}
	}
	for _, f := range status.GetFailures() {
		if f.GetService().GetNamespace() == r.question.service.Namespace && f.GetService().GetName() == r.question.service.Name {
			s.differs("it cannot program the Service: %s", f.GetReason())
		}
	}
	if e := status.GetProgrammingError(); e != "" {
		s.differs("it cannot program its kernel: %s", e)
	}
}

// judge judges the agent's answer, and says what happens to connections.
func (r *explainReport) judge(s *step, a *nodeAnswer) {
	for _, p := range a.Problems {
		s.fact("not served: %s", p)
	}
	if r.others {
		s.fact("the rules of other proxies are not compared")
	}
	// What differs comes first among the reasons, because it decides what the step's state is.
	defer func() {
		for _, u := range a.Unjudged {
			s.notJudged("%s", u)
		}
	}()
	if !*a.Served && len(r.verdict) == 0 {
		r.refused = true
		r.verdict = append(r.verdict, fmt.Sprintf("%s has no rules for %s: the Service has no such port or family", r.question.node, r.question.name))
	}
	for _, p := range a.Ports {
		var texts []string
		of := map[string][]string{}
		for _, k := range p.Packets {
			var text string
			switch {
			case k.Difference != "":
				s.differs("%s", k.Difference)
				text = "what comes there " + k.Found + ", which is not what was decided"
				if k.DecidedBy != "" {
					text += "; see " + k.DecidedBy + ", which is another program's"
				}
			case len(k.RefusedBy) > 0:
				r.refused = true
				text = strings.Join(k.RefusedBy, "; ") + ", which the proxy has not set"
				if why := "all rules of Slicecast are as they should be, and what comes there " + text; !slices.Contains(s.Why, why) {
					s.Why = append(s.Why, why) // although the step agrees
				}
			case k.Deviation != "" && strings.Contains(k.Found, "reaches"):
				text = "what comes there " + k.Found + ": " + k.Deviation
			case k.Found == "":
				text = "what the kernel does is not known; decided is " + k.Wanted + ": " + k.Because
			case k.Wanted == "drop" || k.Wanted == "reject":
				r.refused = true
				text = map[string]string{"drop": "dropped", "reject": "rejected"}[k.Wanted] + ": " + k.Because
			default:
				text = fmt.Sprintf("reaches %d of %s", k.Backends, show.Plural("endpoint", p.EndpointCount))
			}
			if of[text] == nil {
				texts = append(texts, text)
			}
			of[text] = append(of[text], k.Frontend+" from "+k.Source)
		}
		for _, text := range texts {
			where := ""
			switch n := len(of[text]); {
			case n == len(p.Packets):
			case n <= 2:
				where = " at " + strings.Join(of[text], " and ")
			default:
				where = fmt.Sprintf(" at %s and %d others", of[text][0], n-1)
			}
			r.verdict = append(r.verdict, fmt.Sprintf("%s, %s%s: %s", r.question.node, p.ID, where, text))
		}
		if p.Flows.Stale > 0 {
			s.differs("%d of %s of %s in conntrack lead to no backend", p.Flows.Stale, show.Plural("flow", p.Flows.Total), p.ID)
		}
	}
}
