package wire

import pb "github.com/slicecast/slicecast/proto/slicecast/v1"

// WarningNames are the names of all NodeWarnings in metrics and in tables. The last one stands for
// warnings of newer agents.
var WarningNames = []string{"pod_range_ipv4", "pod_range_ipv6", "kube_proxy", "kernel_differs", "not_served", "other"}

// WarningName returns the name of a warning, one of WarningNames.
func WarningName(w pb.NodeWarning) string { return WarningNames[WarningIndex(w)] }

// WarningIndex returns the index of a warning's name in WarningNames.
func WarningIndex(w pb.NodeWarning) int {
	if i := int(w) - 1; i >= 0 && i < len(WarningNames) {
		return i
	}
	return len(WarningNames) - 1
}
