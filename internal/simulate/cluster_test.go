// This file is the truth: the objects of the cluster, and every state that each of them ever had.
// Objects carry the number of their state as an address, so that a node's rules say which states
// they were made from.
package simulate

import (
	"fmt"
	"net/netip"
	"slices"
	"sort"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
)

// These bound the objects of a cluster. Names come back, as in clusters with rolling updates.
const (
	maxServices  = 8
	maxSlices    = 3 // of a Service and an IP family
	maxEndpoints = 10
	namespace    = "default"
)

// portNames are the ports that a Service may have, and that every slice has.
var portNames = []string{"http", "dns", "grpc"}

// serviceState is a state of a Service.
type serviceState struct {
	ports    []string
	families []model.Family
	local    bool // externalTrafficPolicy
	nodePort bool
	affinity bool
	// scheduler is that of IPVS, which older agents do not know.
	scheduler string
}

// sliceState is a state of a slice: the endpoints by number, and whether each is ready.
type sliceState struct{ endpoints map[int]bool }

// entry is a state that an object had from a tick on.
type entry struct {
	tick int
	// number identifies the state. 0 means that the object does not exist.
	number  int
	service *serviceState
	slice   *sliceState
}

// object is a Service or a slice with its states, oldest first. The first one is that it does not
// exist.
type object struct {
	key     model.Key
	index   int // of the Service
	part    int // of the slice among those of its Service and family
	family  model.Family
	entries []entry
	numbers int
}

// offers reports whether a state of a Service has a port.
func (e *entry) offers(id view.ServicePortID) bool {
	return e.number > 0 && slices.Contains(e.service.ports, id.Port) && slices.Contains(e.service.families, id.Family)
}

// offers reports whether the state of a number has a port.
func (o *object) offers(number int, id view.ServicePortID) bool {
	return slices.ContainsFunc(o.entries, func(e entry) bool { return e.number == number && e.offers(id) })
}

func (o *object) now() *entry { return &o.entries[len(o.entries)-1] }

// cluster is the truth.
type cluster struct {
	etcd *etcd

	mu sync.Mutex // guards the fields below
	// tick counts changes, including restores, which take the version back but not the tick.
	tick     int
	services []*object
	slices   [][]*object // by index of the Service
	nodes    map[string]*corev1.Node
	names    []string // of Nodes, in the order of their creation
	born     metav1.Time
}

// identity returns the Service that identifies the cluster by the time of its creation.
func (c *cluster) identity() *corev1.Service {
	return &corev1.Service{
		TypeMeta: kinds[services],
		ObjectMeta: metav1.ObjectMeta{
			Namespace: model.ClusterService.Namespace, Name: model.ClusterService.Name, ResourceVersion: "1", CreationTimestamp: c.born,
		},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: "10.96.255.1", ClusterIPs: []string{"10.96.255.1"}},
	}
}

// bear makes the cluster another one.
func (c *cluster) bear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.born = metav1.Now()
	c.etcd.put(services, model.ClusterService.Name, func(version uint64) any {
		s := c.identity()
		s.ResourceVersion = fmt.Sprint(version)
		return s
	})
}

func newCluster() *cluster {
	c := &cluster{etcd: newEtcd(), nodes: make(map[string]*corev1.Node)}
	absent := func() []entry { return []entry{{}} }
	for i := range maxServices {
		name := fmt.Sprint("svc-", i)
		c.services = append(c.services, &object{
			key: model.Key{Kind: model.KindService, Namespace: namespace, Name: name}, index: i, entries: absent(),
		})
		var all []*object
		for _, family := range []model.Family{model.IPv4, model.IPv6} {
			for part := range maxSlices {
				all = append(all, &object{
					key:   model.Key{Kind: model.KindSlice, Namespace: namespace, Name: fmt.Sprintf("%s-%v-%d", name, family, part)},
					index: i, part: part, family: family, entries: absent(),
				})
			}
		}
		for _, s := range all {
			s.key.Name = fmt.Sprintf("svc-%d-%d-%d", i, s.family, s.part)
		}
		c.slices = append(c.slices, all)
	}
	c.bear()
	return c
}

// set writes a new state of an object. The object is removed if both states are nil.
func (c *cluster) set(o *object, service *serviceState, slice *sliceState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if service == nil && slice == nil && o.now().number == 0 {
		return
	}
	e := entry{service: service, slice: slice}
	if service != nil || slice != nil {
		o.numbers++
		e.number = o.numbers
	}
	c.writeLocked(o, e)
}

// undo writes each object again that has changed since a tick, as it was then. It reports whether
// there is any.
func (c *cluster) undo(tick int) (changed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range c.all() {
		then := sort.Search(len(o.entries), func(i int) bool { return o.entries[i].tick > tick }) - 1
		if e := o.entries[then]; e.number != o.now().number {
			c.writeLocked(o, e)
			changed = true
		}
	}
	return changed
}

// writeLocked writes a state of an object.
func (c *cluster) writeLocked(o *object, e entry) {
	c.tick++
	e.tick = c.tick
	o.entries = append(o.entries, e)
	switch service, slice := e.service, e.slice; {
	case service != nil:
		c.etcd.put(services, o.key.Name, func(version uint64) any { return o.serviceObject(&e, version) })
	case slice != nil:
		c.etcd.put(endpointSlices, o.key.Name, func(version uint64) any { return o.sliceObject(&e, version) })
	case o.key.Kind == model.KindService:
		c.etcd.put(services, o.key.Name, nil)
	default:
		c.etcd.put(endpointSlices, o.key.Name, nil)
	}
}

// all returns all Services and slices.
func (c *cluster) all() []*object {
	out := slices.Clone(c.services)
	for _, s := range c.slices {
		out = append(out, s...)
	}
	return out
}

// setNode writes a Node, or removes it if change is nil.
func (c *cluster) setNode(name string, change func(*corev1.Node)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tick++
	if change == nil {
		delete(c.nodes, name)
		c.names = slices.DeleteFunc(c.names, func(n string) bool { return n == name })
		c.etcd.put(nodesResource, name, nil)
		return
	}
	n := &corev1.Node{TypeMeta: kinds[nodesResource], ObjectMeta: metav1.ObjectMeta{Name: name}}
	if old := c.nodes[name]; old != nil {
		n = old.DeepCopy()
	} else {
		c.names = append(c.names, name)
	}
	change(n)
	c.nodes[name] = n
	c.etcd.put(nodesResource, name, func(version uint64) any {
		out := n.DeepCopy()
		out.ResourceVersion = fmt.Sprint(version)
		return out
	})
}

// saved is a state of the cluster that can be restored.
type saved struct {
	etcd   *backup
	states []entry // of all
	nodes  map[string]*corev1.Node
	names  []string
	born   metav1.Time
}

func (c *cluster) save() *saved {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := &saved{etcd: c.etcd.backup(), nodes: make(map[string]*corev1.Node), names: slices.Clone(c.names), born: c.born}
	for _, o := range c.all() {
		s.states = append(s.states, *o.now())
	}
	for name, n := range c.nodes {
		s.nodes[name] = n
	}
	return s
}

func (c *cluster) restore(s *saved, bump bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tick++
	for i, o := range c.all() {
		if e := s.states[i]; e.number != o.now().number {
			e.tick = c.tick
			o.entries = append(o.entries, e)
		}
	}
	c.nodes, c.names, c.born = make(map[string]*corev1.Node), slices.Clone(s.names), s.born
	for name, n := range s.nodes {
		c.nodes[name] = n
	}
	c.etcd.restore(s.etcd, bump)
}

// clusterIP returns the cluster IP of a Service. Other addresses of the cluster are those of
// endpoints, and the marks that carry numbers of states.
func clusterIP(service int, family model.Family) netip.Addr {
	if family == model.IPv4 {
		return netip.AddrFrom4([4]byte{10, 96, 0, byte(service + 1)})
	}
	return netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x96, 15: byte(service + 1)})
}

func endpointAddress(service int, family model.Family, endpoint int) netip.Addr {
	if family == model.IPv4 {
		return netip.AddrFrom4([4]byte{10, byte(128 + service), 0, byte(endpoint + 1)})
	}
	return netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x80, 13: byte(service), 15: byte(endpoint + 1)})
}

const (
	sliceMark   = 11
	serviceMark = 12
)

// mark returns the address that carries a number of an object.
func mark(kind byte, family model.Family, id, number int) netip.Addr {
	if family == model.IPv4 {
		return netip.AddrFrom4([4]byte{kind, byte(id), byte(number >> 8), byte(number)})
	}
	return netip.AddrFrom16([16]byte{0: 0xfd, 1: kind, 12: byte(id), 14: byte(number >> 8), 15: byte(number)})
}

// unmark returns what mark was given.
func unmark(kind byte, a netip.Addr) (id, number int, ok bool) {
	if a.Is4() {
		b := a.As4()
		return int(b[1]), int(b[2])<<8 | int(b[3]), b[0] == kind
	}
	b := a.As16()
	return int(b[12]), int(b[14])<<8 | int(b[15]), b[0] == 0xfd && b[1] == kind
}

func (o *object) serviceObject(e *entry, version uint64) *corev1.Service {
	s := &corev1.Service{
		TypeMeta:   kinds[services],
		ObjectMeta: metav1.ObjectMeta{Namespace: o.key.Namespace, Name: o.key.Name, ResourceVersion: fmt.Sprint(version)},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, SessionAffinity: corev1.ServiceAffinityNone},
	}
	for _, f := range e.service.families {
		s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, clusterIP(o.index, f).String())
		s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, mark(serviceMark, f, o.index, e.number).String())
	}
	s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
	for _, name := range e.service.ports {
		i := slices.Index(portNames, name)
		p := corev1.ServicePort{Name: name, Protocol: corev1.ProtocolTCP, Port: int32(80 + i), TargetPort: intstr.FromInt32(8080)}
		if name == "dns" {
			p.Protocol = corev1.ProtocolUDP
		}
		if e.service.nodePort {
			p.NodePort = int32(30000 + 10*o.index + i)
		}
		s.Spec.Ports = append(s.Spec.Ports, p)
	}
	if e.service.nodePort {
		s.Spec.Type = corev1.ServiceTypeNodePort
	}
	if e.service.scheduler != "" {
		s.Annotations = map[string]string{source.AnnotationIPVSScheduler: e.service.scheduler}
	}
	if e.service.local {
		s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	}
	if e.service.affinity {
		s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	}
	return s
}

func (o *object) sliceObject(e *entry, version uint64) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		TypeMeta: kinds[endpointSlices],
		ObjectMeta: metav1.ObjectMeta{
			Namespace: o.key.Namespace, Name: o.key.Name, ResourceVersion: fmt.Sprint(version),
			Labels: map[string]string{discoveryv1.LabelServiceName: fmt.Sprint("svc-", o.index)},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	if o.family == model.IPv6 {
		s.AddressType = discoveryv1.AddressTypeIPv6
	}
	for i, name := range portNames {
		p := discoveryv1.EndpointPort{Name: ptr.To(name), Protocol: ptr.To(corev1.ProtocolTCP), Port: ptr.To(int32(8080 + i))}
		if name == "dns" {
			p.Protocol = ptr.To(corev1.ProtocolUDP)
		}
		s.Ports = append(s.Ports, p)
	}
	add := func(a netip.Addr, ready bool, node string) {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{a.String()}, NodeName: ptr.To(node),
			Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(ready), Serving: ptr.To(ready), Terminating: ptr.To(!ready)},
		})
	}
	add(mark(sliceMark, o.family, o.part, e.number), true, "elsewhere")
	for _, n := range sortedKeys(e.slice.endpoints) {
		add(endpointAddress(o.index, o.family, n), e.slice.endpoints[n], fmt.Sprint("node-", n%3))
	}
	return s
}

func sortedKeys[V any](m map[int]V) []int {
	out := make([]int, 0, len(m))
	for k := range m {
		out = append(out, k)
	}
	sort.Ints(out)
	return out
}

// want returns the state that a node should program whose agent is of a form.
func (c *cluster) want(node string, o view.Options, f form) view.State {
	c.mu.Lock()
	defer c.mu.Unlock()
	v := view.New(o)
	convert := source.NewConverter("")
	if n := c.nodes[node]; n != nil {
		m, _ := convert.FromNode(n)
		v.SetNode(m)
	}
	for i, s := range c.services {
		if s.now().number == 0 {
			continue
		}
		object, _ := convert.FromService(s.serviceObject(s.now(), 1))
		object = f.known(object)
		var list []*model.Slice
		for _, o := range c.slices[i] {
			if o.now().number > 0 {
				slice, _ := convert.FromEndpointSlice(o.sliceObject(o.now(), 1))
				list = append(list, slice)
			}
		}
		slices.SortFunc(list, func(a, b *model.Slice) int { return a.Key().Compare(b.Key()) })
		v.Set(object.ServiceKey(), object, list)
	}
	v.Update()
	return v.State()
}

// serves reports whether a state of a Service has ports in an IP family.
func (c *cluster) serves(key model.ServiceKey, number int, family model.Family) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.services[indexOf(key)].entries {
		if e.number == number && number > 0 {
			return len(e.service.ports) > 0 && slices.Contains(e.service.families, family)
		}
	}
	return false
}

// has reports whether an endpoint was ready in any slice of a Service at a tick.
func (c *cluster) has(service int, family model.Family, endpoint, tick int) bool {
	for _, o := range c.slices[service] {
		if o.family != family {
			continue
		}
		i := sort.Search(len(o.entries), func(i int) bool { return o.entries[i].tick > tick }) - 1
		if e := &o.entries[i]; e.number > 0 && e.slice.endpoints[endpoint] {
			return true
		}
	}
	return false
}

// removedSince reports whether an endpoint was not ready at some time after a tick.
func (c *cluster) removedSince(service int, family model.Family, endpoint, tick int) bool {
	for _, o := range c.slices[service] {
		for _, e := range o.entries {
			if e.tick > tick && !c.has(service, family, endpoint, e.tick) {
				return true
			}
		}
	}
	return false
}
