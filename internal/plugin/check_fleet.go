package plugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/version"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/show"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// certificateMargin is how long before its end a certificate has to be renewed. Servers with
// certificates of their own renew them 30 days before.
const certificateMargin = 14 * 24 * time.Hour

// checkFleet checks the servers, relays and agents that run.
func checkFleet(ctx context.Context, f *fleet.Fleet, cluster *cluster, out *checks) error {
	out.begin("servers", "docs/kubectl.md#status")
	answers, all, err := ask(ctx, f, func(ctx context.Context, conn *grpc.ClientConn) (agents, error) {
		return listAgents(ctx, conn, &pb.ListAgentsRequest{})
	})
	switch {
	case errors.Is(err, fleet.ErrNoServers):
		out.bad(failed, "", err.Error(), "install Slicecast, or check a cluster before that with --pre")
		return nil
	case ctx.Err() != nil:
		return err
	case err != nil:
		out.unknown("", err)
		return nil
	}
	stalled := findStale(statuses(answers))
	for _, a := range answers {
		checkServer(a, stalled, out)
	}
	checkCertificates(f, answers, out)
	checkServerClocks(answers, cluster, out)
	nodes, err := nodesOf(ctx, f, answers, all)
	if err != nil {
		return err
	}
	checkConnections(nodes, cluster, out)
	checkVersions(answers, nodes, out)
	cluster.checkServersRights(ctx, answers, out)
	cluster.checkProxies(ctx, out, nodes)
	return nil
}

func checkServer(a fleet.Answer[agents], stalled staleness, out *checks) {
	name := a.Server.String()
	if a.Err != nil {
		out.bad(notChecked, name, a.Err.Error(), "look at the Pod: kubectl -n "+a.Server.Namespace+" describe pod "+a.Server.Name)
		return
	}
	all := problems(a.Value.status, stalled)
	for _, text := range all {
		out.bad(failed, name, text, "look which nodes it is about: kubectl slicecast nodes --behind, and --errors")
	}
	if len(all) == 0 {
		out.ok(name, "%s, %s", serverState(a.Value.status, stalled), show.Plural("node", a.Value.status.GetNodes()))
	}
}

func checkCertificates(f *fleet.Fleet, answers []fleet.Answer[agents], out *checks) {
	out.begin("certificates", "docs/configuration.md#certificates")
	for _, a := range answers {
		chain := f.Chain(a.Server)
		if a.Err != nil || len(chain) == 0 {
			continue // it was not reached, or has no TLS
		}
		end := chain[0].NotAfter
		for _, c := range chain {
			if c.NotAfter.Before(end) {
				end = c.NotAfter
			}
		}
		if left := time.Until(end); left < certificateMargin {
			out.bad(failed, a.Server.String(), fmt.Sprintf("its certificate, or the CA of it, ends in %s", show.Age(left)),
				"renew it; the log of a server with --tls-secret says why it does not do so")
			continue
		}
		out.ok(a.Server.String(), "until %s", end.Format(time.RFC3339))
	}
}

// checkServerClocks compares the servers' clocks with that of the API server.
func checkServerClocks(answers []fleet.Answer[agents], cluster *cluster, out *checks) {
	if cluster.apiErr != nil {
		return // checkClocks has said so
	}
	out.begin("clock", "docs/kubectl.md#clocks")
	for _, a := range answers {
		if a.Err != nil {
			continue
		}
		// The answer was made somewhere between these, and the API server's clock has whole seconds.
		uncertain := a.Received.Sub(a.Sent) + time.Second
		ahead := a.Value.status.GetTime().AsTime().Sub(a.Sent.Add(cluster.api.Ahead))
		tolerated := maxClockDifference + uncertain
		if ahead.Abs() > tolerated {
			out.bad(failed, a.Server.String(), fmt.Sprintf("its clock differs from the API server's by %s", show.Age(ahead)),
				"let its node follow a time server (chrony, systemd-timesyncd)")
			continue
		}
		out.ok(a.Server.String(), "within %s of the API server's", show.Age(tolerated))
	}
}

// checkConnections checks that each node has an agent that is connected and in no trouble.
func checkConnections(nodes *nodesReport, cluster *cluster, out *checks) {
	out.begin("nodes", "docs/kubectl.md#nodes")
	if nodes.agentsErr != nil {
		out.unknown("", nodes.agentsErr)
	}
	held := make(map[string]bool)
	for _, n := range nodes.nodes {
		held[n.Node] = true
		switch {
		case strings.HasPrefix(n.State, notRunning):
			out.bad(failed, n.Node, n.State+"; the node keeps the rules that it has",
				"look at the Pod on that node in the agents' namespace with kubectl describe")
		case n.State == notConnected:
			out.bad(failed, n.Node, "its agent follows no server, and keeps the rules that it has",
				"look at the log of its agent, the Pod on that node in the agents' namespace")
		case n.State == unknown:
			out.bad(notChecked, n.Node, "its agent may follow a server that was not asked",
				"make all servers reachable, and check with their --namespace, or with --all-namespaces if there are several")
		case n.lasting() > slowChange:
			out.bad(failed, n.Node, fmt.Sprintf("it has been %s for more than %v", n.State, slowChange),
				"kubectl slicecast agent with the node's name says what its agent holds, and the log of its Pod why")
		default:
			out.ok(n.Node, "%s, %s", n.State, n.agent.GetProgrammer())
		}
		for _, e := range n.agent.GetErrors() {
			out.bad(failed, n.Node, fmt.Sprintf("it cannot program %s: %s", e.GetObject(), e.GetReason()), "kubectl slicecast nodes --errors shows since when")
		}
	}
	for _, r := range nodes.relays {
		out.bad(notChecked, "relay at "+r.agent.GetAddress(), fmt.Sprintf("%s of it were not checked", show.Plural("node", r.agent.GetNodes())),
			"check with --all-namespaces if it is in another namespace, or ask the relay itself if it is in no Pod of this cluster")
	}
	for i := range cluster.nodes {
		if n := &cluster.nodes[i]; !held[n.Name] && n.Status.NodeInfo.OperatingSystem == "linux" && len(nodes.relays) == 0 {
			out.bad(warning, n.Name, "the node has no agent", "nothing if another proxy serves it; otherwise see agent.nodeSelector and agent.tolerations")
		}
	}
	checkWarnings(nodes, out)
	checkProgrammers(nodes, out)
}

// checkWarnings says what agents warn of, except of kube-proxy, which checkProxies does.
func checkWarnings(nodes *nodesReport, out *checks) {
	out.begin("nodes", "docs/configuration.md#warnings")
	for _, n := range nodes.nodes {
		for _, w := range n.agent.GetWarnings() {
			if w.GetWarning() != pb.NodeWarning_NODE_WARNING_KUBE_PROXY {
				out.bad(failed, n.Node, fmt.Sprintf("%s: %s", wire.WarningName(w.GetWarning()), w.GetReason()), "see the page about this warning")
			}
		}
	}
}

// checkProgrammers looks for nodes that are programmed otherwise than most.
func checkProgrammers(nodes *nodesReport, out *checks) {
	out.begin("programmer", "docs/configuration.md#programmers")
	by := make(map[string][]string)
	for _, n := range nodes.nodes {
		if p := n.agent.GetProgrammer(); p != "" {
			by[p] = append(by[p], n.Node)
		}
	}
	most := ""
	for _, p := range slices.Sorted(maps.Keys(by)) {
		if len(by[p]) > len(by[most]) {
			most = p
		}
	}
	for _, p := range slices.Sorted(maps.Keys(by)) {
		if p == most {
			out.ok("", "%s on %s", p, show.Plural("node", len(by[p])))
			continue
		}
		for _, name := range by[p] {
			out.bad(warning, name, fmt.Sprintf("it is programmed with %s, and most nodes with %s", p, most),
				"slicecast-agent status, run in the agent's Pod, says why: its kernel or image may lack something")
		}
	}
}

// checkVersions checks that all parts are of the same version, or one minor version apart.
func checkVersions(answers []fleet.Answer[agents], nodes *nodesReport, out *checks) {
	out.begin("versions", "deploy/README.md#upgrade-and-downgrade")
	parts := map[string][]string{daemon.Version(): {"this command"}}
	for _, a := range answers {
		if a.Err == nil {
			v := a.Value.status.GetServerVersion()
			parts[v] = append(parts[v], a.Server.String())
		}
	}
	for _, n := range nodes.nodes {
		if v := n.agent.GetClientVersion(); v != "" {
			parts[v] = append(parts[v], n.Node)
		}
	}
	all := slices.Sorted(maps.Keys(parts))
	if len(all) == 1 {
		out.ok("", "everything is %s", all[0])
		return
	}
	result, do := warning, "upgrade what is older, unless that is under way"
	var minors []uint
	for _, text := range all {
		v, err := version.ParseSemantic(text)
		if err != nil {
			minors = nil
			break
		}
		minors = append(minors, v.Major()*1000+v.Minor())
	}
	if len(minors) > 0 && slices.Max(minors)-slices.Min(minors) > 1 {
		result, do = failed, "upgrade step by step: versions work together if they are at most one minor version apart"
	}
	for _, v := range all {
		out.bad(result, subjectsText(parts[v]), "the version is "+v, do)
	}
}

// right returns the right to do something with all objects of a resource.
func right(verb, group, resource string) authorizationv1.SubjectAccessReviewSpec {
	return rightOn(verb, group, resource, "", "")
}

// rightOn returns the right to do something with one object of a namespace or, without a name, with
// all of them.
func rightOn(verb, group, resource, namespace, name string) authorizationv1.SubjectAccessReviewSpec {
	return authorizationv1.SubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{
		Verb: verb, Group: group, Resource: resource, Namespace: namespace, Name: name,
	}}
}

func pathRight(path string) authorizationv1.SubjectAccessReviewSpec {
	return authorizationv1.SubjectAccessReviewSpec{NonResourceAttributes: &authorizationv1.NonResourceAttributes{Verb: "get", Path: path}}
}

// serverRights returns what a server needs to ask the API server for: what all servers do and, by
// its command line, what keeping certificates in a Secret takes.
func serverRights(s *fleet.Server) []authorizationv1.SubjectAccessReviewSpec {
	rights := []authorizationv1.SubjectAccessReviewSpec{
		right("list", "", "services"), right("watch", "", "services"), right("list", "", "nodes"), right("watch", "", "nodes"),
		right("list", "discovery.k8s.io", "endpointslices"), right("watch", "discovery.k8s.io", "endpointslices"),
		right("list", "networking.k8s.io", "servicecidrs"), right("watch", "networking.k8s.io", "servicecidrs"),
		right("create", "authentication.k8s.io", "tokenreviews"), right("create", "authorization.k8s.io", "subjectaccessreviews"),
		pathRight("/openid/v1/jwks"),
		rightOn("create", "", "events", metav1.NamespaceDefault, ""),
	}
	var secret string
	var configMaps []string
	_, _, _ = fleet.CommandLine(containerNamed(s.Pod, s.Container), func(fs *pflag.FlagSet) {
		fs.StringVar(&secret, "tls-secret", "", "")
		fs.StringArrayVar(&configMaps, "ca-config-map", nil, "")
	})
	if secret == "" {
		return rights // its certificates are files
	}
	kept := func(resource, key string) {
		namespace, name, _ := strings.Cut(key, "/")
		// RBAC cannot limit "create" by name.
		rights = append(rights, rightOn("create", "", resource, namespace, ""), rightOn("get", "", resource, namespace, name), rightOn("update", "", resource, namespace, name))
	}
	kept("secrets", secret)
	for _, key := range configMaps {
		kept("configmaps", key)
	}
	return rights
}

// checkServersRights checks the rights of the servers' ServiceAccounts. A relay needs fewer, and is
// not checked.
func (c *cluster) checkServersRights(ctx context.Context, answers []fleet.Answer[agents], out *checks) {
	out.begin("RBAC", "deploy/README.md#upgrade-and-downgrade")
	// By the account and the right's text.
	needed := make(map[string]map[string]authorizationv1.SubjectAccessReviewSpec)
	for _, a := range answers {
		account := a.Server.Namespace + "/" + a.Server.ServiceAccount
		if a.Server.Relay {
			continue
		}
		if needed[account] == nil {
			needed[account] = make(map[string]authorizationv1.SubjectAccessReviewSpec)
		}
		for _, r := range serverRights(a.Server) {
			needed[account][rightText(r)] = r
		}
	}
	for _, account := range slices.Sorted(maps.Keys(needed)) {
		namespace, name, _ := strings.Cut(account, "/")
		var lacks, optional []string
		for _, text := range slices.Sorted(maps.Keys(needed[account])) {
			spec := needed[account][text]
			r := spec.ResourceAttributes
			spec.User = "system:serviceaccount:" + namespace + ":" + name
			spec.Groups = []string{"system:serviceaccounts", "system:serviceaccounts:" + namespace, "system:authenticated"}
			answer, err := fleet.Within(ctx, c.fleet, func(ctx context.Context) (*authorizationv1.SubjectAccessReview, error) {
				return c.client.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{Spec: spec}, metav1.CreateOptions{})
			})
			if err != nil {
				out.unknown(account, err)
				return
			}
			switch {
			case answer.Status.Allowed:
			case r != nil && r.Verb == "create" && (r.Resource == "secrets" || r.Resource == "configmaps"):
				optional = append(optional, text)
			default:
				lacks = append(lacks, text)
			}
		}
		const do = "upgrade the chart, or apply the Roles of deploy/kubernetes/server-rbac.yaml"
		if len(lacks) > 0 {
			out.bad(failed, account, "the servers' ServiceAccount may not "+strings.Join(lacks, ", "), do)
		}
		if len(optional) > 0 {
			out.bad(warning, account, "the servers' ServiceAccount may not "+strings.Join(optional, ", "),
				"nothing, if the Secret and the ConfigMaps of their certificates were created beforehand; otherwise "+do)
		}
		if len(lacks)+len(optional) == 0 {
			out.ok(account, "the servers' ServiceAccount has its rights")
		}
	}
}

func rightText(spec authorizationv1.SubjectAccessReviewSpec) string {
	if a := spec.NonResourceAttributes; a != nil {
		return a.Verb + " " + a.Path
	}
	a := spec.ResourceAttributes
	text := a.Verb + " " + strings.TrimSuffix(a.Resource+"."+a.Group, ".")
	if a.Name != "" {
		text += " " + a.Name
	}
	if a.Namespace != "" {
		text += " in " + a.Namespace
	}
	return text
}
