// These tests prove that nothing that a rogue server can send keeps honest Services from being
// programmed in a real kernel, and that no Service makes the kernel hold more by changing.
package nftables

import (
	"testing"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/programmer/hostiletest"
)

// TestRogueServer asserts that nothing that a rogue server sends keeps honest Services from being
// programmed.
func TestRogueServer(t *testing.T) {
	c := newCluster(t)
	hostiletest.Drive(t, hostiletest.Cluster{Node: c.a, Pods: c.pods, Port: tcpPort, Client: c.client, Restart: func() programmer.Programmer {
		c.restart()
		return c.inHost
	}}, c.inHost)
}

// TestWalk asserts that the table does not grow with the number of changes of a Service.
func TestWalk(t *testing.T) {
	c := newCluster(t)
	hostiletest.Walk(t, hostiletest.Cluster{Node: c.a}, c.inHost)
}
