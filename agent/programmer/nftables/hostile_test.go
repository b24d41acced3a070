package nftables

import (
	"testing"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/programmer/hostiletest"
)

// Nothing that a server sends keeps the programmer from what else it sends.
func TestRogueServer(t *testing.T) {
	c := newCluster(t)
	hostiletest.Drive(t, hostiletest.Cluster{Node: c.a, Pods: c.pods, Port: tcpPort, Client: c.client, Restart: func() programmer.Programmer {
		c.restart()
		return c.inHost
	}}, c.inHost)
}
