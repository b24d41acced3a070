// These tests prove that nothing that a rogue server can send keeps honest Services from being
// programmed in a real kernel, and that no Service makes the kernel hold more by changing.
package iptables

import (
	"testing"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/programmer/hostiletest"
)

// TestRogueServer asserts that nothing that a rogue server sends keeps honest Services from being
// programmed.
func TestRogueServer(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		hostiletest.Drive(t, hostiletest.Cluster{Node: c.a, Pods: c.pods, Port: tcpPort, Client: c.client, Restart: func() programmer.Programmer {
			return newInHost(t, c.a.Host, c.options)
		}}, c.inHost)
	})
}

// TestWalk asserts that the tables do not grow with the number of changes of a Service.
func TestWalk(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		hostiletest.Walk(t, hostiletest.Cluster{Node: c.a}, c.inHost)
	})
}
