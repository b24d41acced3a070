// Package worker runs nodes of a load test in a process of their own. A run has one worker, or
// several if one process may not open enough files. A worker simulates its share of the nodes,
// measures them, and compares them with the true state. It derives the true state itself. The run
// adds up the results of its workers.
package worker

import (
	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/slicecast/slicecast/loadtest/fleet"
	"github.com/slicecast/slicecast/loadtest/generate"
	"github.com/slicecast/slicecast/loadtest/scenario"
)

// Setup says which nodes a worker has and what they connect to.
type Setup struct {
	Scenario scenario.Scenario
	// First is the number of the first node, Count is how many nodes there are, and NamePrefix is
	// the prefix of their names.
	First, Count int
	NamePrefix   string
	// Connecting is the maximum number of nodes that connect at the same time. 0 means all.
	Connecting int

	// Servers are the addresses of Slicecast servers. If there are none, the nodes watch the API
	// server of Kubeconfig, as kube-proxies do.
	Servers []string
	// All certificates and keys are in PEM. Roots issued the certificates of the servers; if it is
	// empty, connections are in plaintext. CA and CAKey issue the certificates of nodes. If CA is
	// empty, all nodes use Certificate and PrivateKey.
	Roots, CA, CAKey, Certificate, PrivateKey []byte
	// ServerName is the name that servers' certificates must have. If it is empty, it is the host
	// of the address.
	ServerName string

	// Cluster is the state if the run makes the changes; it follows from Cluster and the plans.
	// Otherwise it is nil.
	Cluster *generate.Config
	// Kubeconfig is the kubeconfig of the API server that the state comes from, which then has the
	// true state. It is empty if there is none. ServiceProxyName is slicecast-server's
	// --service-proxy-name.
	Kubeconfig       string
	ServiceProxyName string
}

// Cold is the result of a sync of nodes.
type Cold struct {
	Nodes []fleet.Synced
	// Services, Slices and Endpoints are the numbers of objects on the first node.
	Services, Slices, Endpoints int
	// ServerVersions are the versions that Slicecast's servers report.
	ServerVersions []string
}

// Received is what nodes received of a plan, or during an observation.
type Received struct {
	// Latencies and Slow are the latencies of ordinary nodes and of slow nodes, in microseconds.
	Latencies, Slow *hdrhistogram.Snapshot
	// Convergence is that of fleet.Window.
	Convergence [3][]int64
	// Changes is the number of changes that each node had to receive. Objects is the number of
	// objects that all nodes received.
	Changes int
	Objects int64
}

// Sample is the progress of a worker at a moment.
type Sample struct {
	// Up is the number of nodes that are in sync on a stream that has not broken.
	Up int
	// Applied, Owed and Planned are the results of fleet.Window.Progress. If no changes are
	// expected, Applied is the number of objects instead.
	Applied, Owed, Planned int64
	// Recent are the latencies of the updates that were applied since the last sample.
	Recent *hdrhistogram.Snapshot
	// ReceivedBytes and SentBytes are the bytes below TLS since the start.
	ReceivedBytes, SentBytes int64
	// Reconnects is that of fleet.Group.
	Reconnects int64
	// FetchedLists is Fetched of apiserver.Watchers.
	FetchedLists int64
	// CompressedLists is Compressed of apiserver.Watchers.
	CompressedLists int64
}

// Checked is the result of comparing nodes with the true state.
type Checked struct {
	Shards int
	// Wrong describes the differences. It is empty if there are none.
	Wrong string
}
