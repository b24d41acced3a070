package plugin

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/show"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

func newLacksCommand(o *options) *cobra.Command {
	out := &show.Options{Wide: true}
	c := &cobra.Command{
		Use:   "lacks NAMESPACE/SERVICE",
		Short: "Show the nodes that do not have a Service as it is now",
		Long: `lacks shows the nodes that have not programmed the latest state of a Service and its EndpointSlices, or cannot program
it. Nodes that are not connected may lack it, too.`,
		Example: `  kubectl slicecast lacks default/web
  kubectl slicecast lacks default/web --watch`,
		Args: cobra.ExactArgs(1),
		ValidArgsFunction: func(c *cobra.Command, done []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			if len(done) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return o.complete(c, serviceNames)
		},
		RunE: func(c *cobra.Command, args []string) error {
			key, ok := model.ParseServiceKey(args[0])
			if !ok {
				return fmt.Errorf("%q is not the name of a Service: use NAMESPACE/SERVICE", args[0])
			}
			return o.run(c, out, func(ctx context.Context, f *fleet.Fleet) (report, error) { return askLacks(ctx, f, key) })
		},
	}
	addOutputFlags(c, out)
	return c
}

// serviceNames returns the names of all Services, if the user may list them.
func serviceNames(ctx context.Context, f *fleet.Fleet) (names []string, err error) {
	list, err := fleet.List(ctx, f, f.Client().CoreV1().Services("").List, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for _, s := range list.Items {
		names = append(names, s.Namespace+"/"+s.Name)
	}
	return names, nil
}

// lacksReport is the report of lacks. Its nodes are those that lack the Service, or may lack it.
type lacksReport struct {
	*nodesReport
	service model.ServiceKey
	// held is the Service as each server that has answered has it.
	held []heldService
}

// heldService is a Service as a server has it.
type heldService struct {
	Server string `json:"server"`
	// Exists means that the server has the Service or slices of it.
	Exists bool `json:"exists"`
	// Versions identify the content of the Service and its slices, by name. They are the same on
	// servers that have the same content.
	Versions []string `json:"versions"`
	// Endpoints is the number of endpoints in the slices.
	Endpoints int `json:"endpoints"`
}

// lacking is what a server knows of a Service.
type lacking struct {
	agents
	service *pb.GetServiceResponse // nil if the server has nothing of it
}

// errNoVerdict means that a server's clients do not say whether they lack the Service.
var errNoVerdict = errors.New("this version of the server does not answer that: upgrade it")

func askLacks(ctx context.Context, f *fleet.Fleet, key model.ServiceKey) (*lacksReport, error) {
	name := &pb.ServiceName{Namespace: key.Namespace, Name: key.Name}
	answers, all, err := ask(ctx, f, func(ctx context.Context, conn *grpc.ClientConn) (lacking, error) {
		return askLacking(ctx, conn, name)
	})
	if err != nil {
		return nil, err
	}
	nodes, err := nodesOf(ctx, f, as(answers, func(l lacking) agents { return l.agents }), all)
	if err != nil {
		return nil, err
	}
	return lacksOf(nodes, answers, key), nil
}

// askLacking asks a server for a Service and for all of its clients. One list has the clients with
// and without the Service as of one moment. With two lists, a node that leaves in between would
// seem to have the Service.
func askLacking(ctx context.Context, conn *grpc.ClientConn, name *pb.ServiceName) (out lacking, err error) {
	out.service, err = pb.NewDebugServiceClient(conn).GetService(ctx, &pb.GetServiceRequest{Service: name})
	if err != nil && status.Code(err) != codes.NotFound {
		return out, err
	}
	if out.agents, err = listAgents(ctx, conn, &pb.ListAgentsRequest{About: name}); err != nil {
		return out, err
	}
	if slices.ContainsFunc(out.clients, func(c *pb.AgentStatus) bool { return c.Lacks == nil }) {
		return out, errNoVerdict
	}
	return out, nil
}

// lacksOf returns the nodes that lack the Service, or may lack it.
func lacksOf(nodes *nodesReport, answers []fleet.Answer[lacking], key model.ServiceKey) *lacksReport {
	r := &lacksReport{nodesReport: nodes, service: key}
	// What a server says of a client counts if the node's agent follows that server, and if that
	// server's state is not stale.
	has := func(n node) bool { return n.agent != nil && n.stale == 0 && !n.agent.GetLacks() }
	r.nodes, r.relays = slices.DeleteFunc(r.nodes, has), slices.DeleteFunc(r.relays, has)
	for _, a := range answers {
		if a.Err == nil {
			r.held = append(r.held, held(a))
		}
	}
	return r
}

func held(a fleet.Answer[lacking]) heldService {
	s := a.Value.service
	out := heldService{Server: a.Server.String(), Exists: s != nil, Versions: []string{hex.EncodeToString(s.GetService().GetVersion())}}
	for _, slice := range s.GetSlices() {
		out.Versions = append(out.Versions, hex.EncodeToString(slice.GetVersion()))
		out.Endpoints += len(slice.GetEndpoints())
	}
	return out
}

// exists reports whether any server has the Service.
func (r *lacksReport) exists() bool {
	return slices.ContainsFunc(r.held, func(h heldService) bool { return h.Exists })
}

// differ reports whether servers have different states of the Service, as while one of them is
// behind.
func (r *lacksReport) differ() bool {
	return slices.ContainsFunc(r.held, func(h heldService) bool { return !slices.Equal(h.Versions, r.held[0].Versions) })
}

// code implements report.
func (r *lacksReport) code() int { return r.codeOf(len(r.nodes) > 0 || !r.exists() || r.differ()) }

// Fields implements show.Report.
func (r *lacksReport) Fields() []show.Field {
	return append([]show.Field{{Name: "service", Value: nonNil(r.held)}}, r.nodesReport.Fields()...)
}

// Print implements show.Report.
func (r *lacksReport) Print(out *show.Page) {
	r.servers.print(out)
	if len(r.held) > 0 {
		r.printService(out)
	}
	if len(r.nodes) == 0 {
		out.Title("0 nodes lack it")
	} else {
		out.Title("Nodes that lack it, or may lack it: %d", len(r.nodes))
		printNodes(out, r.nodes)
	}
	r.printUnknown(out)
}

func (r *lacksReport) printService(out *show.Page) {
	switch {
	case !r.exists():
		out.Title("The servers have no Service %v: check its name. If it was removed, the nodes below still have it", r.service)
	case r.differ():
		out.Title("The servers have different states of the Service %v", r.service)
		out.Row("SERVER", "EXISTS", "ENDPOINTS", "VERSION")
		for _, h := range r.held {
			out.Row(h.Server, fmt.Sprint(h.Exists), fmt.Sprint(h.Endpoints), h.Versions[0][:min(16, len(h.Versions[0]))])
		}
	default:
		out.Title("The servers have the Service %v with %s", r.service, show.Plural("endpoint", r.held[0].Endpoints))
	}
}
