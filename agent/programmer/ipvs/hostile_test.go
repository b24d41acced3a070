// These tests prove that nothing that a rogue server can send keeps honest Services from being
// programmed in a real kernel, and that no Service makes the kernel hold more by changing.
package ipvs

import (
	"testing"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/programmer/hostiletest"
	"github.com/slicecast/slicecast/agent/view"
)

// TestRogueServer asserts that nothing that a rogue server sends keeps honest Services from being
// programmed.
func TestRogueServer(t *testing.T) {
	c := newCluster(t, Options{})
	hostiletest.Drive(t, hostiletest.Cluster{Node: c.a, Pods: c.pods, Port: tcpPort, Client: c.client, Options: view.Options{Schedulers: Schedulers()}, Restart: func() programmer.Programmer {
		return newInHost(t, c.a.Host, Options{})
	}}, c.inHost)
}

// TestWalk asserts that IPVS, the table and the device do not grow with the number of changes of a
// Service.
func TestWalk(t *testing.T) {
	c := newCluster(t, Options{})
	hostiletest.Walk(t, hostiletest.Cluster{Node: c.a, Options: view.Options{Schedulers: Schedulers()}}, c.inHost)
}
