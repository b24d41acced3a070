// This test proves that nothing that a rogue server can send keeps honest Services from being
// programmed in a real kernel.
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
