// This test proves that nothing that a rogue server can send keeps honest Services from being
// programmed in a real kernel.
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
