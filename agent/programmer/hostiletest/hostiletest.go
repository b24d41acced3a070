// Package hostiletest drives programmers with the worst that a rogue server can send. Its Services
// are canonical, because the decoder refuses all others, and each of them reaches a limit in one
// respect. None of them may keep a programmer from programming honest Services.
package hostiletest

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/wire"
)

// endpoints is the number of endpoints that a hostile Service has in each IP family.
const endpoints = 40

// Cluster is the environment in which a programmer works.
type Cluster struct {
	Node   *testenv.Node // the node that the programmer works on
	Pods   []*testenv.Pod
	Port   uint16 // the TCP port that the pods serve
	Client *testenv.Client
	// Restart returns the programmer of a new process that takes over.
	Restart func() programmer.Programmer
	Options view.Options
}

// Drive lets a programmer hold honest Services, and adds hostile ones one by one. The hostile
// Services are still there when another process takes over, and are then removed. After each step,
// Drive asserts that honest traffic arrives.
func Drive(t *testing.T, c Cluster, p programmer.Programmer) {
	t.Helper()
	d := c.driver(t)
	honest := c.honest()
	d.set(honest...)
	for _, o := range honest {
		d.honest[o.ServiceKey()] = true
	}
	check := func(step string) {
		for _, from := range []*testenv.Host{c.Client.Host, c.Pods[0].Host} {
			for i, to := range append(clusterIPs(0), clusterIPs(1)...) {
				r := from.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(to, 80), 1, patient)
				require.True(t, r.All(testenv.Answered), "%s: %v of %d: %v", step, to, i, r)
			}
		}
		r := c.Client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(c.Node.IPv4, nodePort), 1, patient)
		require.True(t, r.All(testenv.Answered), "%s: node port: %v", step, r)
	}
	d.view.Update()
	require.NoError(t, p.Replace(t.Context(), d.view.State()))
	check("alone")

	extremes := modeltest.Extremes()
	for _, s := range extremes {
		objects := []model.Object{s}
		if s.Name != "no-endpoints" {
			for _, slice := range modeltest.ExtremeSlices(s, endpoints) {
				objects = append(objects, slice)
			}
		}
		d.set(objects...)
		d.apply(p, s.Name)
		check(s.Name)
	}
	p = c.Restart()
	d.onlyHostile(p.Replace(t.Context(), d.view.State()), "another process")
	check("another process")
	for _, s := range extremes {
		d.view.Set(s.ServiceKey(), nil, nil)
		d.apply(p, s.Name+" goes")
	}
	require.NoError(t, p.Replace(t.Context(), d.view.State()), "nothing hostile is left")
	check("alone again")
}

// driver returns a driver with a view of the node.
func (c *Cluster) driver(t *testing.T) *driver {
	c.Options.NodeName = c.Node.Name
	// These are the pods of testenv.
	c.Options.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.180.0.0/16"), netip.MustParsePrefix("fd00:10:180::/48")}
	c.Options.NodePortAddresses = []netip.Prefix{netip.PrefixFrom(c.Node.IPv4, 32), netip.PrefixFrom(c.Node.IPv6, 128)}
	return &driver{T: t, view: view.New(c.Options), honest: map[model.ServiceKey]bool{}}
}

type driver struct {
	*testing.T
	view   *view.View
	honest map[model.ServiceKey]bool
}

// set adds objects to the view as they come from a server, after encoding and decoding them. Each
// Service is followed by its slices.
func (d *driver) set(objects ...model.Object) {
	d.Helper()
	u := &model.Update{Full: true, To: 1}
	for _, o := range objects {
		switch o := o.(type) {
		case *model.Service:
			u.Services = append(u.Services, o)
		case *model.Slice:
			u.Slices = append(u.Slices, o)
		}
	}
	frame, err := wire.EncodeUpdate(u)
	require.NoError(d, err)
	r, err := wire.Decode(frame)
	require.NoError(d, err)
	require.Empty(d, r.Problems)
	for _, s := range r.Update.Services {
		d.view.Set(s.ServiceKey(), s, slices.DeleteFunc(slices.Clone(r.Update.Slices), func(e *model.Slice) bool { return e.ServiceKey() != s.ServiceKey() }))
	}
}

func (d *driver) apply(p programmer.Programmer, step string) {
	d.Helper()
	changes, node := d.view.Update()
	require.False(d, node)
	d.onlyHostile(p.Apply(d.Context(), changes), step)
}

// onlyHostile asserts that only ports of hostile Services could not be programmed.
func (d *driver) onlyHostile(err error, step string) {
	d.Helper()
	ports, ok := programmer.PortErrors(err)
	require.True(d, ok, "%s: %v", step, err)
	for _, p := range ports {
		require.False(d, d.honest[p.ID.Service], "%s: %v", step, p)
		d.Logf("%s: %.300v", step, p)
	}
}

// nodePort is the NodePort of the first honest Service. The second one has the next port.
const nodePort = 30500

// clusterIPs returns the cluster IPs of the ith honest Service, which are within the ranges of
// testenv.ServiceCIDRs.
func clusterIPs(i int) []netip.Addr {
	return []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 0, byte(101 + i)}), netip.MustParseAddr(fmt.Sprintf("fd00:10:96::%d", 101+i))}
}

// honest returns two Services that lead to the pods, each followed by its slices.
func (c *Cluster) honest() []model.Object {
	var objects []model.Object
	for i, name := range []string{"first", "second"} {
		objects = append(objects, model.NewService(model.Service{
			Namespace: "honest", Name: name, Type: model.NodePort, ClusterIPs: clusterIPs(i), CreationTimeSeconds: 1_754_000_000,
			Ports: []model.ServicePort{{Name: "http", Protocol: model.TCP, Port: 80, NodePort: nodePort + uint16(i)}},
		}))
		for _, family := range []model.Family{model.IPv4, model.IPv6} {
			slice := model.Slice{
				Namespace: "honest", Name: fmt.Sprintf("%s-%d", name, family), Service: name, Family: family,
				Ports: []model.SlicePort{{Name: "http", Protocol: model.TCP, Port: c.Port}},
			}
			for _, p := range c.Pods {
				slice.Endpoints = append(slice.Endpoints, model.Endpoint{
					Address: p.Addr(family == model.IPv6), Conditions: model.Conditions{Ready: true, Serving: true}, NodeName: p.Node.Name,
				})
			}
			objects = append(objects, model.NewSlice(slice))
		}
	}
	return objects
}

// patient lets a probe wait long enough for an answer on a busy machine.
var patient = testenv.ProbeOptions{Timeout: 20 * time.Second}
