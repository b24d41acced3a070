package model

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

// ErrBase is returned by Apply when the slice does not become the one that the delta promises, as
// it is not the one that the delta was made from: the receiver must ask for the whole slice.
var ErrBase = errors.New("delta does not fit the slice that it is applied to")

// SliceDelta turns one version of a Slice into another that differs in endpoints only. Its lists are as Check says.
type SliceDelta struct {
	Namespace, Name string
	// Service that the slice belongs to, and Before, the slice that the delta was made from, do not go over the wire: a receiver
	// has them.
	Before     *Slice
	Service    string
	Version    Version              // that results
	Endpoints  []Endpoint           // new, or changed in more than conditions; ascending by address
	Conditions []EndpointConditions // changed in conditions only; ascending by index
	Removed    []netip.Addr         // ascending
	// LastChangeTriggerTimeMS is that of the new version; see Slice.
	LastChangeTriggerTimeMS int64
}

// EndpointConditions are new conditions for the endpoint at this place of the base, from 0: a number of one or two bytes on
// the wire where the address would be the largest part of the most frequent change there is.
type EndpointConditions struct {
	Index      uint32
	Conditions Conditions
}

// Key names the Slice.
func (d *SliceDelta) Key() Key { return Key{KindSlice, d.Namespace, d.Name} }

// Len is the number of endpoints that the delta touches.
func (d *SliceDelta) Len() int { return len(d.Endpoints) + len(d.Conditions) + len(d.Removed) }

// Diff gives the delta from a to b, two states of the slice with the same key. It is nil where a delta cannot say the
// difference (other ports, Service or family) or where the whole slice would be no larger.
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

// Worse tells whether b, the state of a slice after a, lacks an endpoint that a had, or has one that took traffic in a and
// may not any more: what nodes must hear of first.
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

// walk visits the union of two lists that are ascending by address, with nil for the side that lacks it, and the place in a.
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

// Apply returns the slice that the delta makes of s, or ErrBase. s stays as it is. If both are canonical, so is the result.
//
// The result is checked against the version that the delta promises, unless s is not Exact.
func (d *SliceDelta) Apply(s *Slice) (*Slice, error) {
	if s.Key() != d.Key() {
		return nil, fmt.Errorf("%w: it is of %s, and this is %s", ErrBase, d.Key(), s.Key())
	}
	if len(d.Endpoints) > 0 && FamilyOf(d.Endpoints[0].Address) != s.Family {
		return nil, fmt.Errorf("%w: %s is of another family than %s", ErrBase, s.Key(), d.Endpoints[0].Address)
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
		return nil, fmt.Errorf("%w: %s would have %d endpoints, and may have %d", ErrBase, s.Key(), len(n.Endpoints), MaxEndpoints)
	}
	n.leaves = hashLeaves(n.Endpoints, s)
	own := n.hash()
	if s.exact && own != d.Version {
		return nil, fmt.Errorf("%w: %s would become %v, the delta promises %v", ErrBase, s.Key(), own, d.Version)
	}
	n.version, n.exact = d.Version, own == d.Version
	return &n, nil
}

// Update is a change of one shard, or all of it: what a ShardUpdate says on the wire.
type Update struct {
	Shard    uint32
	From, To uint64 // sequences; the update holds the changes in (From, To]
	Full     bool   // the whole shard: what is not named here no longer exists
	// FullBuckets are buckets that the update holds whole: what is in one of them and not named here no longer exists.
	FullBuckets []uint32
	Services    []*Service
	Slices      []*Slice
	Deltas      []*SliceDelta
	Removed     []Key
	// Left are the Services that objects have left, by removal or for another Service. It does not go over the wire: it is
	// for those who follow some Services only.
	Left []Departure
	// Unreadable are objects that the update holds and that its receiver could not decode: they are neither changed nor, by
	// a full update, removed.
	Unreadable []Unreadable
	// ResourceVersions are those of the source that the update reflects, of the kinds that it changes.
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
	// Version that the object has where the update comes from; zero if it is unknown.
	Version Version
	// Delta: it is a delta that did not decode, and the whole may.
	Delta bool
}

// Len is the number of objects that the update names.
func (u *Update) Len() int {
	return len(u.Services) + len(u.Slices) + len(u.Deltas) + len(u.Removed)
}

// Position is a place in the history of one shard of a store.
type Position struct{ Epoch, Sequence uint64 }

// ResourceVersions are the highest Kubernetes resourceVersions seen of each kind; 0 where the source has none. There is one
// for each kind because each is watched by itself: a watch of Services that is up to date says nothing of one of slices
// that is not.
type ResourceVersions struct {
	Services, Slices uint64
}

// Max gives the higher ones of both.
func (r ResourceVersions) Max(o ResourceVersions) ResourceVersions {
	return ResourceVersions{max(r.Services, o.Services), max(r.Slices, o.Slices)}
}

// Min returns the lower ones of both.
func (r ResourceVersions) Min(o ResourceVersions) ResourceVersions {
	return ResourceVersions{min(r.Services, o.Services), min(r.Slices, o.Slices)}
}

// With returns the versions with another one of a kind; a Node's does not count.
func (r ResourceVersions) With(kind Kind, version uint64) ResourceVersions {
	switch kind {
	case KindService:
		r.Services = version
	case KindSlice:
		r.Slices = version
	}
	return r
}

// ResourceVersionOf gives the versions with one kind's; a Node's does not count.
func ResourceVersionOf(kind Kind, version uint64) ResourceVersions {
	switch kind {
	case KindService:
		return ResourceVersions{Services: version}
	case KindSlice:
		return ResourceVersions{Slices: version}
	}
	return ResourceVersions{}
}
