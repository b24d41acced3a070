package model

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

// ErrBase is returned by Apply if the delta was not made from this slice. The receiver must ask for
// the whole slice.
var ErrBase = errors.New("delta does not fit the slice that it is applied to")

// SliceDelta turns one version of a Slice into another one that differs in endpoints only. Its
// lists are canonical; see SliceDelta.Check.
type SliceDelta struct {
	Namespace, Name string
	// Before is the slice that the delta was made from, and Service the Service that the slice
	// belongs to. Neither goes over the wire, because a receiver has the slice.
	Before     *Slice
	Service    string
	Version    Version              // the version of the result
	Endpoints  []Endpoint           // new, or changed beyond conditions; ascending by address
	Conditions []EndpointConditions // changed in their conditions only; ascending by index
	Removed    []netip.Addr         // ascending
	// LastChangeTriggerTimeMS is the time of the new version, in milliseconds since 1970; see
	// Slice.
	LastChangeTriggerTimeMS int64
}

// EndpointConditions are new conditions for the endpoint at an index of the base, counted from 0.
// On the wire the index takes one or two bytes. Changed conditions are the most frequent change,
// and an address would be the largest part of it.
type EndpointConditions struct {
	Index      uint32
	Conditions Conditions
}

// Key returns the key of the Slice.
func (d *SliceDelta) Key() Key { return Key{KindSlice, d.Namespace, d.Name} }

// Len returns the number of endpoints that the delta changes.
func (d *SliceDelta) Len() int { return len(d.Endpoints) + len(d.Conditions) + len(d.Removed) }

// Diff returns the delta from a to b, two states of the slice with the same key. It returns nil if
// a delta cannot express the difference, because ports, Service or family differ, or if the whole
// slice would be no larger than the delta.
func Diff(a, b *Slice) *SliceDelta {
	if a.Service != b.Service || a.Family != b.Family || !slices.Equal(a.Ports, b.Ports) {
		return nil
	}
	d := &SliceDelta{
		Namespace: b.Namespace, Name: b.Name, Service: b.Service, Before: a, Version: b.version,
		LastChangeTriggerTimeMS: b.LastChangeTriggerTimeMS,
	}
	walk(a.Endpoints, b.Endpoints, func(i int, old, now *Endpoint) {
		switch {
		case now == nil:
			d.Removed = append(d.Removed, old.Address)
		case old != nil && old.Equal(now):
		case old != nil && old.sameButConditions(now):
			d.Conditions = append(d.Conditions, EndpointConditions{uint32(i), now.Conditions})
		default:
			d.Endpoints = append(d.Endpoints, *now)
		}
	})
	if len(d.Endpoints) >= len(b.Endpoints) && len(d.Endpoints) > 0 || d.Len() > 2*len(b.Endpoints) {
		return nil
	}
	return d
}

// Worse reports whether b, a later state of the slice a, takes an endpoint out of use: it lacks an
// endpoint of a, or has one that is no longer ready or no longer serving. Nodes must receive such
// changes first.
func Worse(a, b *Slice) bool {
	worse := false
	walk(a.Endpoints, b.Endpoints, func(_ int, old, now *Endpoint) {
		switch {
		case old == nil:
		case now == nil, old.Conditions.Ready && !now.Conditions.Ready, old.Conditions.Serving && !now.Conditions.Serving:
			worse = true
		}
	})
	return worse
}

// walk visits the union of two lists that are ascending by address. A list that lacks the address
// is represented by nil. i is the index in a.
func walk(a, b []Endpoint, visit func(i int, a, b *Endpoint)) {
	i, j := 0, 0
	for i < len(a) || j < len(b) {
		var c int
		switch {
		case i == len(a):
			c = 1
		case j == len(b):
			c = -1
		default:
			c = a[i].Address.Compare(b[j].Address)
		}
		switch {
		case c < 0:
			visit(i, &a[i], nil)
			i++
		case c > 0:
			visit(i, nil, &b[j])
			j++
		default:
			visit(i, &a[i], &b[j])
			i++
			j++
		}
	}
}

// Apply returns the slice that results from applying the delta to s, or ErrBase. It does not change
// s. If the delta and s are canonical, so is the result.
//
// The caller must compare the result's version with the one that the delta promises. If they
// differ, the delta was made from another slice, or from one with content that s lacks.
func (d *SliceDelta) Apply(s *Slice) (*Slice, error) {
	if s.Key() != d.Key() {
		return nil, fmt.Errorf("%w: the delta is for %s, the slice is %s", ErrBase, d.Key(), s.Key())
	}
	if len(d.Endpoints) > 0 && FamilyOf(d.Endpoints[0].Address) != s.Family {
		return nil, fmt.Errorf("%w: %s and the new endpoint %s are of different IP families", ErrBase, s.Key(), d.Endpoints[0].Address)
	}
	n := *s
	n.LastChangeTriggerTimeMS = d.LastChangeTriggerTimeMS
	n.Endpoints = make([]Endpoint, 0, len(s.Endpoints)+len(d.Endpoints))
	changed, conditions, removed := d.Endpoints, d.Conditions, d.Removed
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		for len(changed) > 0 && changed[0].Address.Less(e.Address) {
			n.Endpoints = append(n.Endpoints, changed[0])
			changed = changed[1:]
		}
		switch {
		case len(removed) > 0 && removed[0] == e.Address:
			removed = removed[1:]
		case len(changed) > 0 && changed[0].Address == e.Address:
			n.Endpoints = append(n.Endpoints, changed[0])
			changed = changed[1:]
		case len(conditions) > 0 && conditions[0].Index == uint32(i):
			with := *e
			with.Conditions = conditions[0].Conditions
			n.Endpoints = append(n.Endpoints, with)
			conditions = conditions[1:]
		default:
			n.Endpoints = append(n.Endpoints, *e)
		}
	}
	n.Endpoints = append(n.Endpoints, changed...)
	if len(removed) > 0 || len(conditions) > 0 {
		return nil, fmt.Errorf("%w: %s lacks endpoints that the delta changes", ErrBase, s.Key())
	}
	if len(n.Endpoints) > MaxEndpoints {
		return nil, fmt.Errorf("%w: %s would have %d endpoints, more than the maximum of %d", ErrBase, s.Key(), len(n.Endpoints), MaxEndpoints)
	}
	n.leaves = hashLeaves(n.Endpoints, s)
	n.version = n.hash()
	return &n, nil
}

// Update is a change of one shard, or the whole shard. It corresponds to a ShardUpdate on the wire.
type Update struct {
	Shard    uint32
	From, To uint64 // sequences; the update holds the changes in (From, To]
	Full     bool   // the update holds the whole shard; objects that it does not name are gone
	// FullBuckets are the buckets that the update holds whole. An object in one of these buckets
	// that the update does not name no longer exists.
	FullBuckets []uint32
	Services    []*Service
	Slices      []*Slice
	Deltas      []*SliceDelta
	Removed     []Key
	// Left lists the objects that have left a Service, because they were removed or now belong to
	// another Service. It does not go over the wire. The fan-out needs it for streams that follow
	// only some Services.
	Left []Departure
	// Unreadable lists the objects of the update that its receiver could not decode. Applying the
	// update neither changes nor, if the update is full, removes them.
	Unreadable []Unreadable
	// Unverified lists the objects of the update that have fields which its receiver does not know.
	// The hash of the content that the receiver knows is not the sender's version, and nothing shows
	// whether the sender's version is right.
	Unverified []Unverified
	// ResourceVersions are the source's versions that the update reflects, for the kinds that it
	// changes; 0 for other kinds.
	ResourceVersions ResourceVersions
}

// Departure is an object that no longer belongs to a Service.
type Departure struct {
	Key     Key
	Service ServiceKey
}

// Unreadable is an object of an update that its receiver could not decode.
type Unreadable struct {
	Key Key
	// Version is the object's version at the sender; zero if it is unknown.
	Version Version
	// Delta means that the object was sent as a delta that did not decode. The whole object may
	// still decode.
	Delta bool
}

// Unverified is an object of an update of whose fields its receiver knows only some.
type Unverified struct {
	Key     Key
	Version Version // the object's version at the sender
}

// Len returns the number of objects that the update names.
func (u *Update) Len() int {
	return len(u.Services) + len(u.Slices) + len(u.Deltas) + len(u.Removed)
}

// Position is a place in the history of one shard of a store.
type Position struct{ Epoch, Sequence uint64 }

// ResourceVersions are the highest Kubernetes resourceVersions seen of each kind; 0 if the source
// has none. Each kind has its own, because each is watched separately: an up-to-date watch of
// Services says nothing about the watch of slices.
type ResourceVersions struct {
	Services, Slices, Nodes uint64
}

// Max returns the higher version of each kind.
func (r ResourceVersions) Max(o ResourceVersions) ResourceVersions {
	return ResourceVersions{max(r.Services, o.Services), max(r.Slices, o.Slices), max(r.Nodes, o.Nodes)}
}

// Min returns the lower version of each kind.
func (r ResourceVersions) Min(o ResourceVersions) ResourceVersions {
	return ResourceVersions{min(r.Services, o.Services), min(r.Slices, o.Slices), min(r.Nodes, o.Nodes)}
}

// With returns the versions with the version of one kind replaced. It ignores ServiceCIDRs, which
// are not distributed.
func (r ResourceVersions) With(kind Kind, version uint64) ResourceVersions {
	switch kind {
	case KindService:
		r.Services = version
	case KindSlice:
		r.Slices = version
	case KindNode:
		r.Nodes = version
	}
	return r
}
