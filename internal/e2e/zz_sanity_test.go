package e2e

import "testing"
import "github.com/stretchr/testify/require"

func TestZSanity(t *testing.T) {
	for _, which := range []string{"a", "b"} {
		t.Run("writes"+which, func(t *testing.T) {
			c := newCluster(t)
			pods := c.Deployment("web", 2)
			web := c.Service("web", selecting("web", tcp("tcp", 80, onPodPort()), udp("udp", 80, onPodPort())))
			c.RequireAnswers(web, 80, pods...)
			p := c.ProbeAllTheTime(web, 80)
			c.RequireAnswers(web, 80, pods...)
			p.RequireNoFailure()
			w := c.watchWrites()
			if which == "a" {
				c.b.agent.Kill()
			} else {
				c.a.agent.Kill()
			}
			lead, err := c.b.leads(t.Context())
			require.NoError(t, err)
			t.Log(lead)
			c.SetReady(pods[0], false)
			c.AwaitAPI(web, 80, pods[1:])
			c.SetReady(pods[0], true)
			c.AwaitAPI(web, 80, pods)
			c.AwaitTruth()
			w.RequireNone()
		})
	}
	t.Run("flush", func(t *testing.T) {
		c := newCluster(t)
		pods := c.Deployment("web", 2)
		web := c.Service("web", selecting("web", tcp("tcp", 80, onPodPort()), udp("udp", 80, onPodPort())))
		c.RequireAnswers(web, 80, pods...)
		p := c.ProbeAllTheTime(web, 80)
		conns := c.Connect(web, 80)
		c.b.Run(t.Context(), "sh", "-c", "iptables-legacy-save > /tmp/x; iptables-legacy -t nat -F; iptables-legacy-restore < /tmp/x")
		conns.RequireAlive()
		c.AwaitTruth()
		p.RequireNoFailure()
	})
}
