package app

import (
	"context"
	"fmt"
	"iter"
	"net/netip"

	"github.com/slicecast/slicecast/agent/kubeproxy"
	"github.com/slicecast/slicecast/agent/verify"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// check returns a function that says what should be mended on this node.
func (a *agent) check(options view.Options) func(context.Context) map[pb.NodeWarning]string {
	// Without rules of its own, there is nothing that a kube-proxy could interfere with.
	expected := a.options.kubeProxyExpected() || a.options.programsNothing()
	var detector kubeproxy.Detector
	return func(ctx context.Context) map[pb.NodeWarning]string {
		out := make(map[pb.NodeWarning]string)
		unrecognized := options.UnrecognizedPods(a.cache.Node(), a.localEndpoints())
		for family, w := range map[model.Family]pb.NodeWarning{
			model.IPv4: pb.NodeWarning_NODE_WARNING_POD_RANGE_IPV4, model.IPv6: pb.NodeWarning_NODE_WARNING_POD_RANGE_IPV6,
		} {
			if reason := unrecognized[family]; reason != "" {
				out[w] = reason
			}
		}
		if shadow, ok := a.programmer.Programmer.(*verify.Shadow); ok && shadow.Reason() != "" {
			out[pb.NodeWarning_NODE_WARNING_KERNEL_DIFFERS] = shadow.Reason()
		}
		if expected {
			return out
		}
		where, err := detector.Find(ctx)
		if err != nil {
			a.logger.Debug("Cannot look for rules of kube-proxy", "err", err)
		}
		if where != "" {
			out[pb.NodeWarning_NODE_WARNING_KUBE_PROXY] = fmt.Sprintf("kube-proxy runs on this node (%s) and programs the same "+
				"Services: end it here and remove its rules with slicecast-agent cleanup --kube-proxy, or set besideKubeProxy if "+
				"it serves other Services; delete its DaemonSet only if all nodes have an agent that programs them", where)
		}
		return out
	}
}

// localEndpoints yields the addresses of the endpoints on this node.
func (a *agent) localEndpoints() iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		for _, key := range a.cache.Services() {
			_, list := a.cache.Service(key)
			for _, slice := range list {
				for i := range slice.Endpoints {
					if e := &slice.Endpoints[i]; e.NodeName == a.options.NodeName && !yield(e.Address) {
						return
					}
				}
			}
		}
	}
}
