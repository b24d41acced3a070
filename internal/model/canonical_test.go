// These tests prove that Check accepts exactly the canonical objects: each bound at its limit and
// just beyond, each order, duplicate and combination of fields. They also prove that Apply and the
// generators of modeltest yield canonical objects only.
package model_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
)

var prefix = netip.MustParsePrefix

func addrs(list ...string) (out []netip.Addr) {
	for _, s := range list {
		out = append(out, addr(s))
	}
	return out
}

// numbered returns n addresses in ascending order.
func numbered(n int) (out []netip.Addr) {
	for i := range n {
		out = append(out, netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}))
	}
	return out
}

func TestDrawnObjectsAreCanonical(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		require.NoError(t, modeltest.Service(t, modeltest.ServiceKey(t)).Check())
		before := modeltest.Slice(t, modeltest.SliceKey(t))
		require.NoError(t, before.Check())
		after := modeltest.Changed(t, before)
		require.NoError(t, after.Check())
		if d := model.Diff(before, after); d != nil {
			require.NoError(t, d.Check())
			got, err := d.Apply(before)
			require.NoError(t, err)
			require.NoError(t, got.Check())
		}
		require.NoError(t, modeltest.Node(t, "node-1").Check())
	})
	for _, s := range modeltest.Extremes() {
		require.NoError(t, s.Check())
	}
}

// check is a change to a canonical object, with the beginning of the error that Check returns for
// the result. An empty err means that the result is canonical, too.
type check[T any] struct {
	change func(*T)
	err    string
}

func TestCanonicalService(t *testing.T) {
	ports := func(list ...model.ServicePort) func(*model.Service) { return func(s *model.Service) { s.Ports = list } }
	long := strings.Repeat("a", 63)
	for name, c := range map[string]check[model.Service]{
		"as it is":           {func(*model.Service) {}, ""},
		"nothing but a name": {func(s *model.Service) { *s = model.Service{Namespace: "a", Name: "b", Type: model.ClusterIP} }, ""},

		"longest names":          {func(s *model.Service) { s.Namespace, s.Name = long, long }, ""},
		"longer name":            {func(s *model.Service) { s.Name = long + "a" }, "name: "},
		"longer namespace":       {func(s *model.Service) { s.Namespace = long + "a" }, "namespace: "},
		"no name":                {func(s *model.Service) { s.Name = "" }, "name: "},
		"no namespace":           {func(s *model.Service) { s.Namespace = "" }, "namespace: "},
		"a slash in a name":      {func(s *model.Service) { s.Name = "a/b" }, "name: "},
		"a line in a name":       {func(s *model.Service) { s.Name = "a\n-A" }, "name: "},
		"hyphen in a name":       {func(s *model.Service) { s.Name = "a-b" }, ""},
		"hyphen first":           {func(s *model.Service) { s.Name = "-a" }, "name: "},
		"hyphen last":            {func(s *model.Service) { s.Name = "a-" }, "name: "},
		"name that is no UTF-8":  {func(s *model.Service) { s.Name = "\xff" }, "name: "},
		"type":                   {func(s *model.Service) { s.Type = 4 }, "type: "},
		"no type":                {func(s *model.Service) { s.Type = 0 }, "type: "},
		"internal policy":        {func(s *model.Service) { s.InternalTrafficPolicy = 3 }, "internal_traffic_policy: "},
		"external policy":        {func(s *model.Service) { s.ExternalTrafficPolicy, s.HealthCheckNodePort = 3, 0 }, "external_traffic_policy: "},
		"longest affinity":       {func(s *model.Service) { s.ClientIPAffinitySeconds = model.MaxAffinitySeconds }, ""},
		"longer affinity":        {func(s *model.Service) { s.ClientIPAffinitySeconds = model.MaxAffinitySeconds + 1 }, "client_ip_affinity_seconds: "},
		"traffic distribution":   {func(s *model.Service) { s.TrafficDistribution = "example.com/Nearest" }, ""},
		"bad distribution":       {func(s *model.Service) { s.TrafficDistribution = "a b" }, "traffic_distribution: "},
		"longest scheduler":      {func(s *model.Service) { s.IPVSScheduler = long }, ""},
		"longer scheduler":       {func(s *model.Service) { s.IPVSScheduler = long + "a" }, "ipvs_scheduler: "},
		"scheduler with a space": {func(s *model.Service) { s.IPVSScheduler = "rr -w" }, "ipvs_scheduler: "},

		"both families":           {func(s *model.Service) { s.ClusterIPs = addrs("10.96.0.1", "fd00::1") }, ""},
		"link-local cluster IP":   {func(s *model.Service) { s.ClusterIPs = addrs("169.254.7.7") }, ""},
		"class E":                 {func(s *model.Service) { s.ClusterIPs = addrs("255.255.255.254") }, ""},
		"two of a family":         {func(s *model.Service) { s.ClusterIPs = addrs("10.96.0.1", "10.96.0.2") }, "cluster_ips: "},
		"order of cluster IPs":    {func(s *model.Service) { s.ClusterIPs = addrs("fd00::1", "10.96.0.1") }, "cluster_ips: "},
		"no cluster IP":           {func(s *model.Service) { s.ClusterIPs = []netip.Addr{{}} }, "cluster_ips: "},
		"loopback cluster IP":     {func(s *model.Service) { s.ClusterIPs = addrs("127.0.0.1") }, "cluster_ips: "},
		"unspecified cluster IP":  {func(s *model.Service) { s.ClusterIPs = addrs("::") }, "cluster_ips: "},
		"zone of a cluster IP":    {func(s *model.Service) { s.ClusterIPs = addrs("fd00::1%eth0") }, "cluster_ips: "},
		"mapped cluster IP":       {func(s *model.Service) { s.ClusterIPs = addrs("::ffff:10.96.0.1") }, "cluster_ips: "},
		"most external IPs":       {func(s *model.Service) { s.ExternalIPs = numbered(model.MaxFrontends) }, ""},
		"of both families":        {func(s *model.Service) { s.ExternalIPs = append(numbered(model.MaxFrontends), addr("fd00::1")) }, ""},
		"more external IPs":       {func(s *model.Service) { s.ExternalIPs = numbered(model.MaxFrontends + 1) }, "external_ips: "},
		"external IP twice":       {func(s *model.Service) { s.ExternalIPs = addrs("192.0.2.1", "192.0.2.1") }, "external_ips: "},
		"order of external IPs":   {func(s *model.Service) { s.ExternalIPs = addrs("192.0.2.2", "192.0.2.1") }, "external_ips: "},
		"link-local external IP":  {func(s *model.Service) { s.ExternalIPs = addrs("169.254.169.254") }, "external_ips: "},
		"loopback external IP":    {func(s *model.Service) { s.ExternalIPs = addrs("::1") }, "external_ips: "},
		"unspecified external IP": {func(s *model.Service) { s.ExternalIPs = addrs("0.0.0.0") }, "external_ips: "},
		"multicast external IP":   {func(s *model.Service) { s.ExternalIPs = addrs("239.0.0.1") }, "external_ips: "},
		"broadcast external IP":   {func(s *model.Service) { s.ExternalIPs = addrs("255.255.255.255") }, "external_ips: "},

		"most ports": {func(s *model.Service) {
			s.Ports = nil
			for i := range model.MaxFrontends {
				s.Ports = append(s.Ports, model.ServicePort{Name: fmt.Sprintf("p%05d", i), Protocol: model.TCP, Port: uint16(i + 1)})
			}
		}, ""},
		"more ports": {func(s *model.Service) {
			s.Ports = nil
			for i := range model.MaxFrontends + 1 {
				s.Ports = append(s.Ports, model.ServicePort{Name: fmt.Sprintf("p%05d", i), Protocol: model.TCP, Port: uint16(i + 1)})
			}
		}, "ports: "},
		"ports of one number": {ports(model.ServicePort{Name: "a", Protocol: model.TCP, Port: 53, NodePort: 30053},
			model.ServicePort{Name: "b", Protocol: model.UDP, Port: 53, NodePort: 30053}), ""},
		"one name":           {ports(model.ServicePort{Protocol: model.TCP, Port: 53}, model.ServicePort{Protocol: model.UDP, Port: 53}), ""},
		"longest port name":  {ports(model.ServicePort{Name: long, Protocol: model.TCP, Port: 53}), ""},
		"longer port name":   {ports(model.ServicePort{Name: long + "a", Protocol: model.TCP, Port: 53}), "ports.name: "},
		"bad port name":      {ports(model.ServicePort{Name: "a.b", Protocol: model.TCP, Port: 53}), "ports.name: "},
		"highest numbers":    {ports(model.ServicePort{Protocol: model.SCTP, Port: 65535, NodePort: 65535}), ""},
		"no number":          {ports(model.ServicePort{Protocol: model.TCP}), "ports.port: "},
		"no protocol":        {ports(model.ServicePort{Port: 1}), "ports.protocol: "},
		"protocol":           {ports(model.ServicePort{Protocol: 4, Port: 1}), "ports.protocol: "},
		"name twice":         {ports(model.ServicePort{Protocol: 1, Port: 1}, model.ServicePort{Protocol: 1, Port: 2}), "ports: "},
		"order of ports":     {ports(model.ServicePort{Name: "b", Protocol: 1, Port: 1}, model.ServicePort{Name: "a", Protocol: 1, Port: 2}), "ports: "},
		"number twice":       {ports(model.ServicePort{Name: "a", Protocol: 1, Port: 1}, model.ServicePort{Name: "b", Protocol: 1, Port: 1}), "ports.port: "},
		"NodePort twice":     {ports(model.ServicePort{Name: "a", Protocol: 1, Port: 1, NodePort: 3}, model.ServicePort{Name: "b", Protocol: 1, Port: 2, NodePort: 3}), "ports.node_port: "},
		"NodePort of a VIP":  {func(s *model.Service) { *s = *modeltest.Web(); s.Ports[0].NodePort = 3 }, "ports.node_port: "},
		"most ingress":       {func(s *model.Service) { s.LoadBalancerIngress = ingress(numbered(model.MaxFrontends)...) }, ""},
		"more ingress":       {func(s *model.Service) { s.LoadBalancerIngress = ingress(numbered(model.MaxFrontends + 1)...) }, "load_balancer_ingress: "},
		"ingress twice":      {func(s *model.Service) { s.LoadBalancerIngress = ingress(addrs("192.0.2.1", "192.0.2.1")...) }, "load_balancer_ingress: "},
		"link-local ingress": {func(s *model.Service) { s.LoadBalancerIngress = ingress(addr("fe80::1")) }, ""},
		"loopback ingress":   {func(s *model.Service) { s.LoadBalancerIngress = ingress(addr("127.1.2.3")) }, "load_balancer_ingress: "},
		"multicast ingress":  {func(s *model.Service) { s.LoadBalancerIngress = ingress(addr("ff02::1")) }, "load_balancer_ingress: "},
		"range of everything": {func(s *model.Service) {
			s.LoadBalancerSourceRanges = []netip.Prefix{prefix("0.0.0.0/0"), prefix("::/0")}
		}, ""},
		"ranges in a range": {func(s *model.Service) {
			s.LoadBalancerSourceRanges = []netip.Prefix{prefix("10.0.0.0/8"), prefix("10.0.0.0/9")}
		}, ""},
		"most ranges":  {func(s *model.Service) { s.LoadBalancerSourceRanges = ranges(model.MaxFrontends) }, ""},
		"more ranges":  {func(s *model.Service) { s.LoadBalancerSourceRanges = ranges(model.MaxFrontends + 1) }, "load_balancer_source_ranges: "},
		"range twice":  {func(s *model.Service) { s.LoadBalancerSourceRanges = slices.Repeat(ranges(1), 2) }, "load_balancer_source_ranges: "},
		"host bits":    {func(s *model.Service) { s.LoadBalancerSourceRanges = []netip.Prefix{prefix("10.0.0.1/8")} }, "load_balancer_source_ranges: "},
		"mapped range": {func(s *model.Service) { s.LoadBalancerSourceRanges = []netip.Prefix{prefix("::ffff:10.0.0.0/104")} }, "load_balancer_source_ranges: "},
		"no range":     {func(s *model.Service) { s.LoadBalancerSourceRanges = []netip.Prefix{{}} }, "load_balancer_source_ranges: "},
		"ingress of a NodePort": {func(s *model.Service) {
			s.Type, s.HealthCheckNodePort = model.NodePort, 0
			s.LoadBalancerIngress = ingress(addr("192.0.2.1"))
		}, "load_balancer_ingress: "},
		"ranges of a NodePort": {func(s *model.Service) {
			s.Type, s.HealthCheckNodePort = model.NodePort, 0
			s.LoadBalancerSourceRanges = ranges(1)
		}, "load_balancer_ingress: "},
		"health check of a NodePort":       {func(s *model.Service) { s.Type = model.NodePort }, "health_check_node_port: "},
		"health check without need of one": {func(s *model.Service) { s.ExternalTrafficPolicy = model.TrafficCluster }, "health_check_node_port: "},
	} {
		s := model.Service{
			Namespace: "default", Name: "web", Type: model.LoadBalancer, ClusterIPs: addrs("10.96.0.1"), ExternalTrafficPolicy: model.TrafficLocal,
			Ports: []model.ServicePort{{Protocol: model.TCP, Port: 80, NodePort: 30080}}, HealthCheckNodePort: 30080,
		}
		c.change(&s)
		requireError(t, c.err, s.Check(), name)
	}
}

func ingress(list ...netip.Addr) (out []model.LoadBalancerIngress) {
	for _, a := range list {
		out = append(out, model.LoadBalancerIngress{IP: a})
	}
	return out
}

func ranges(n int) (out []netip.Prefix) {
	for _, a := range numbered(n) {
		out = append(out, netip.PrefixFrom(a, 32))
	}
	return out
}

// requireError requires err to begin with want, which names a field, or to be nil if want is empty.
func requireError(t *testing.T, want string, err error, name string) {
	t.Helper()
	if want == "" {
		require.NoError(t, err, name)
		return
	}
	require.Error(t, err, name)
	require.Equal(t, want, err.Error()[:min(len(want), len(err.Error()))], "%s: %v", name, err)
	require.Less(t, len(err.Error()), 500, name)
}

func TestCanonicalSlice(t *testing.T) {
	first := func(change func(e *model.Endpoint)) func(*model.Slice) {
		return func(s *model.Slice) { change(&s.Endpoints[0]) }
	}
	for name, c := range map[string]check[model.Slice]{
		"as it is":              {func(*model.Slice) {}, ""},
		"nothing but a Service": {func(s *model.Slice) { s.Ports, s.Endpoints = nil, nil }, ""},
		"longest name":          {func(s *model.Slice) { s.Name = strings.Repeat("a.", 126) + "a" }, ""},
		"longer name":           {func(s *model.Slice) { s.Name = strings.Repeat("a.", 126) + "aa" }, "name: "},
		"no name":               {func(s *model.Slice) { s.Name = "" }, "name: "},
		"no Service":            {func(s *model.Slice) { s.Service = "" }, "service: "},
		"longest Service":       {func(s *model.Slice) { s.Service = strings.Repeat("A", 63) }, ""},
		"longer Service":        {func(s *model.Slice) { s.Service = strings.Repeat("A", 64) }, "service: "},
		"family":                {func(s *model.Slice) { s.Family = 3 }, "address_type: "},
		"no family":             {func(s *model.Slice) { s.Family = 0 }, "address_type: "},
		"the other family":      {func(s *model.Slice) { s.Family = model.IPv6 }, "address: "},

		"most ports":   {func(s *model.Slice) { s.Ports = slicePorts(model.MaxSlicePorts) }, ""},
		"more ports":   {func(s *model.Slice) { s.Ports = slicePorts(model.MaxSlicePorts + 1) }, "ports: "},
		"port twice":   {func(s *model.Slice) { s.Ports = append(s.Ports, s.Ports[0]) }, "ports: "},
		"name twice":   {func(s *model.Slice) { s.Ports = append(s.Ports, model.SlicePort{Name: "http", Protocol: 1, Port: 81}) }, "ports: "},
		"port order":   {func(s *model.Slice) { s.Ports = append(s.Ports, model.SlicePort{Name: "a", Protocol: 1, Port: 81}) }, "ports: "},
		"port 0":       {func(s *model.Slice) { s.Ports[0].Port = 0 }, "ports.port: "},
		"protocol":     {func(s *model.Slice) { s.Ports[0].Protocol = 0 }, "ports.protocol: "},
		"no port name": {func(s *model.Slice) { s.Ports[0].Name = "" }, ""},
		"port name":    {func(s *model.Slice) { s.Ports[0].Name = "HTTP" }, "ports.name: "},

		"most endpoints":       {func(s *model.Slice) { s.Endpoints = endpoints(model.MaxEndpoints) }, ""},
		"more endpoints":       {func(s *model.Slice) { s.Endpoints = endpoints(model.MaxEndpoints + 1) }, "endpoints: "},
		"endpoint twice":       {func(s *model.Slice) { s.Endpoints = append(s.Endpoints, s.Endpoints[2]) }, "endpoints: "},
		"order of endpoints":   {func(s *model.Slice) { slices.Reverse(s.Endpoints) }, "endpoints: "},
		"no address":           {first(func(e *model.Endpoint) { e.Address = netip.Addr{} }), "address: "},
		"loopback endpoint":    {first(func(e *model.Endpoint) { e.Address = addr("127.0.0.1") }), "address: "},
		"link-local endpoint":  {first(func(e *model.Endpoint) { e.Address = addr("169.254.169.254") }), "address: "},
		"multicast endpoint":   {first(func(e *model.Endpoint) { e.Address = addr("224.0.0.1") }), "address: "},
		"unspecified endpoint": {first(func(e *model.Endpoint) { e.Address = addr("0.0.0.0") }), "address: "},
		"mapped endpoint":      {first(func(e *model.Endpoint) { e.Address = addr("::ffff:10.0.0.1") }), "address: "},

		"longest node":    {first(func(e *model.Endpoint) { e.NodeName = strings.Repeat("a", 253) }), ""},
		"longer node":     {first(func(e *model.Endpoint) { e.NodeName = strings.Repeat("a", 254) }), "node_name: "},
		"bad node":        {first(func(e *model.Endpoint) { e.NodeName = "a b" }), "node_name: "},
		"longest zone":    {first(func(e *model.Endpoint) { e.Zone = strings.Repeat("Z", 63) }), ""},
		"longer zone":     {first(func(e *model.Endpoint) { e.Zone = strings.Repeat("Z", 64) }), "zone: "},
		"most zone hints": {first(func(e *model.Endpoint) { e.ZoneHints = letters(model.MaxHints) }), ""},
		"more zone hints": {first(func(e *model.Endpoint) { e.ZoneHints = letters(model.MaxHints + 1) }), "zone_hints: "},
		"zone hint twice": {first(func(e *model.Endpoint) { e.ZoneHints = []string{"a", "a"} }), "zone_hints: "},
		"zone hint order": {first(func(e *model.Endpoint) { e.ZoneHints = []string{"b", "a"} }), "zone_hints: "},
		"zone hint":       {first(func(e *model.Endpoint) { e.ZoneHints = []string{"a/b"} }), "zone_hints: "},
		"most node hints": {first(func(e *model.Endpoint) { e.NodeHints = letters(model.MaxHints) }), ""},
		"more node hints": {first(func(e *model.Endpoint) { e.NodeHints = letters(model.MaxHints + 1) }), "node_hints: "},
		"node hint twice": {first(func(e *model.Endpoint) { e.NodeHints = []string{"a", "a"} }), "node_hints: "},
		"node hint":       {first(func(e *model.Endpoint) { e.NodeHints = []string{"A"} }), "node_hints: "},
	} {
		s := modeltest.WebSlice(3)
		c.change(&s)
		requireError(t, c.err, s.Check(), name)
	}
}

func letters(n int) (out []string) {
	for i := range n {
		out = append(out, string(rune('a'+i)))
	}
	return out
}

func slicePorts(n int) (out []model.SlicePort) {
	for i := range n {
		out = append(out, model.SlicePort{Name: fmt.Sprintf("p%05d", i), Protocol: model.TCP, Port: uint16(i + 1)})
	}
	return out
}

func endpoints(n int) (out []model.Endpoint) {
	for _, a := range numbered(n) {
		out = append(out, model.Endpoint{Address: a})
	}
	return out
}

func TestCanonicalDelta(t *testing.T) {
	at := func(indexes ...uint32) (out []model.EndpointConditions) {
		for _, i := range indexes {
			out = append(out, model.EndpointConditions{Index: i})
		}
		return out
	}
	for name, c := range map[string]check[model.SliceDelta]{
		"as it is":                  {func(*model.SliceDelta) {}, ""},
		"nothing but a name":        {func(d *model.SliceDelta) { *d = model.SliceDelta{Namespace: "a", Name: "b"} }, ""},
		"no name":                   {func(d *model.SliceDelta) { d.Name = "" }, "name: "},
		"no namespace":              {func(d *model.SliceDelta) { d.Namespace = "" }, "namespace: "},
		"endpoint twice":            {func(d *model.SliceDelta) { d.Endpoints = append(d.Endpoints, d.Endpoints[1]) }, "endpoints: "},
		"order of endpoints":        {func(d *model.SliceDelta) { slices.Reverse(d.Endpoints) }, "endpoints: "},
		"node":                      {func(d *model.SliceDelta) { d.Endpoints[0].NodeName = "a b" }, "node_name: "},
		"both families":             {func(d *model.SliceDelta) { d.Endpoints[1].Address = addr("fd00::1") }, "address: "},
		"most endpoints":            {func(d *model.SliceDelta) { d.Endpoints = endpoints(model.MaxEndpoints) }, ""},
		"more endpoints":            {func(d *model.SliceDelta) { d.Endpoints = endpoints(model.MaxEndpoints + 1) }, "endpoints: "},
		"index twice":               {func(d *model.SliceDelta) { d.Conditions = at(1, 1) }, "conditions: "},
		"order of indexes":          {func(d *model.SliceDelta) { d.Conditions = at(2, 1) }, "conditions: "},
		"highest index":             {func(d *model.SliceDelta) { d.Conditions = at(model.MaxEndpoints - 1) }, ""},
		"higher index":              {func(d *model.SliceDelta) { d.Conditions = at(model.MaxEndpoints) }, "conditions: "},
		"removed twice":             {func(d *model.SliceDelta) { d.Removed = addrs("10.99.0.1", "10.99.0.1") }, "removed: "},
		"order of removals":         {func(d *model.SliceDelta) { d.Removed = addrs("10.99.0.2", "10.99.0.1") }, "removed: "},
		"removed loopback":          {func(d *model.SliceDelta) { d.Removed = addrs("127.0.0.1") }, "removed: "},
		"most removals":             {func(d *model.SliceDelta) { d.Removed = numbered(model.MaxEndpoints) }, ""},
		"more removals":             {func(d *model.SliceDelta) { d.Removed = numbered(model.MaxEndpoints + 1) }, "removed: "},
		"removed of another family": {func(d *model.SliceDelta) { d.Removed = addrs("fd00::1") }, "removed: "},
		"removed of both families":  {func(d *model.SliceDelta) { d.Endpoints, d.Removed = nil, addrs("10.99.0.1", "fd00::1") }, "removed: "},
		"changed and removed":       {func(d *model.SliceDelta) { d.Removed = []netip.Addr{addr("10.99.0.1"), d.Endpoints[1].Address} }, "removed: "},
	} {
		d := model.SliceDelta{
			Namespace: "default", Name: "web-1", Endpoints: []model.Endpoint{modeltest.WebEndpoint(1), modeltest.WebEndpoint(2)},
			Conditions: at(0, 5), Removed: addrs("10.99.0.1"),
		}
		c.change(&d)
		requireError(t, c.err, d.Check(), name)
	}
}

// TestApplyKeepsSlicesCanonical checks that Apply refuses a delta if its result for this slice is
// not canonical, even if the result would have the promised version.
func TestApplyKeepsSlicesCanonical(t *testing.T) {
	base := modeltest.WebSlice(model.MaxEndpoints)
	for name, endpoint := range map[string]model.Endpoint{
		"the other family":  {Address: addr("fd00::1")},
		"one more endpoint": {Address: addr("10.99.0.1")},
	} {
		result := modeltest.WebSlice(model.MaxEndpoints)
		result.Endpoints = append(result.Endpoints, endpoint)
		d := &model.SliceDelta{
			Namespace: base.Namespace, Name: base.Name, Endpoints: []model.Endpoint{endpoint}, Version: model.NewSlice(result).ContentVersion(),
		}
		require.NoError(t, d.Check())
		_, err := d.Apply(model.NewSlice(base))
		require.ErrorIs(t, err, model.ErrBase, name)
	}
}

func TestCanonicalNode(t *testing.T) {
	long := strings.Repeat("a", 63)
	for name, c := range map[string]check[model.Node]{
		"as it is":            {func(*model.Node) {}, ""},
		"nothing but a name":  {func(n *model.Node) { *n = model.Node{Name: "a"} }, ""},
		"no name":             {func(n *model.Node) { n.Name = "" }, "name: "},
		"name":                {func(n *model.Node) { n.Name = "Node" }, "name: "},
		"longest label":       {func(n *model.Node) { n.Labels = map[string]string{strings.Repeat("a", 253) + "/" + long: long} }, ""},
		"longer prefix":       {func(n *model.Node) { n.Labels = map[string]string{strings.Repeat("a", 254) + "/" + long: long} }, "labels: "},
		"longer key":          {func(n *model.Node) { n.Labels = map[string]string{"a/" + long + "a": long} }, "labels: "},
		"no key":              {func(n *model.Node) { n.Labels = map[string]string{"a/": long} }, "labels: "},
		"longer value":        {func(n *model.Node) { n.Labels = map[string]string{"a": long + "a"} }, "labels: "},
		"most addresses":      {func(n *model.Node) { n.Addresses = numbered(model.MaxNodeAddresses) }, ""},
		"more addresses":      {func(n *model.Node) { n.Addresses = numbered(model.MaxNodeAddresses + 1) }, "addresses: "},
		"order of addresses":  {func(n *model.Node) { n.Addresses = addrs("fd00::1", "10.0.0.2", "10.0.0.1") }, ""},
		"address twice":       {func(n *model.Node) { n.Addresses = addrs("10.0.0.2", "10.0.0.1", "10.0.0.2") }, "addresses: "},
		"own addresses":       {func(n *model.Node) { n.Addresses = addrs("127.0.0.1", "fe80::1") }, ""},
		"unspecified address": {func(n *model.Node) { n.Addresses = addrs("0.0.0.0") }, "addresses: "},
		"most pod CIDRs":      {func(n *model.Node) { n.PodCIDRs = ranges(model.MaxCIDRs) }, ""},
		"more pod CIDRs":      {func(n *model.Node) { n.PodCIDRs = ranges(model.MaxCIDRs + 1) }, "pod_cidrs: "},
		"pod CIDR twice":      {func(n *model.Node) { n.PodCIDRs = slices.Repeat(ranges(1), 2) }, "pod_cidrs: "},
		"pod CIDR":            {func(n *model.Node) { n.PodCIDRs = []netip.Prefix{prefix("10.0.0.1/8")} }, "pod_cidrs: "},
		"most service CIDRs":  {func(n *model.Node) { n.ServiceCIDRs = ranges(model.MaxServiceCIDRs) }, ""},
		"more service CIDRs":  {func(n *model.Node) { n.ServiceCIDRs = ranges(model.MaxServiceCIDRs + 1) }, "service_cidrs: "},
		"service CIDR twice":  {func(n *model.Node) { n.ServiceCIDRs = slices.Repeat(ranges(1), 2) }, "service_cidrs: "},
	} {
		n := model.Node{Name: "node-1.example", Labels: map[string]string{"topology.kubernetes.io/zone": "a_B.c"}, Addresses: addrs("10.0.0.1")}
		c.change(&n)
		requireError(t, c.err, n.Check(), name)
	}
}

func TestCanonicalKey(t *testing.T) {
	for key, want := range map[model.Key]string{
		{Kind: model.KindService, Namespace: "a", Name: "b"}:   "",
		{Kind: model.KindService, Namespace: "a", Name: "b.c"}: "name: ",
		{Kind: model.KindService, Name: "b"}:                   "namespace: ",
		{Kind: model.KindSlice, Namespace: "a", Name: "b.c"}:   "",
		{Kind: model.KindSlice, Namespace: "a", Name: "b..c"}:  "name: ",
		{Kind: model.KindSlice, Namespace: "a.b", Name: "c"}:   "namespace: ",
		{Kind: model.KindNode, Name: "a.b"}:                    "",
		{Kind: model.KindNode, Namespace: "a", Name: "b"}:      "namespace: ",
		{Kind: 9, Namespace: "a", Name: "b"}:                   "kind: ",
	} {
		requireError(t, want, key.Check(), key.String())
	}
}
