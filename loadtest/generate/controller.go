package generate

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/internal/model"
)

// sliceSize is the maximum number of endpoints in a slice: the default of the EndpointSlice
// controller.
const sliceSize = 100

// portName is the name of the only port of each Service.
const portName = "http"

type service struct {
	object *model.Service
	slices []*slice
	// wanted is the number of endpoints that the Service has, or will have after Scale.
	wanted int
	// made counts all slices ever created, to name them.
	made int
}

// slice is one of a Service's slices. Without endpoints it has no ports, like the slice that the
// controller keeps for a Service without pods.
type slice struct {
	name      string
	endpoints []model.Endpoint
	// triggerMS is the time of the last change, in milliseconds since 1970. It is 0 before the
	// first.
	triggerMS int64
}

func (s *slice) object(of *service) *model.Slice {
	o := model.Slice{
		Namespace: of.object.Namespace, Name: s.name, Service: of.object.Name, Family: model.IPv4,
		Endpoints: slices.Clone(s.endpoints), LastChangeTriggerTimeMS: s.triggerMS,
	}
	if len(s.endpoints) > 0 {
		o.Ports = []model.SlicePort{{Name: portName, Protocol: model.TCP, Port: 8080}}
	}
	return model.NewSlice(o)
}

// sync updates a Service's slices after some of its pods have gone, changed their conditions or
// come. It returns the slices that differ and those that were removed. It follows the rules of the
// EndpointSlice controller's reconciler:
//
//  1. Endpoints that go or change do so in the slices that they are in.
//  2. New endpoints fill slices that change anyway, the fullest first.
//  3. The rest goes into the slice that it fills best, or into new slices.
//  4. Slices that would be removed replace new slices, the last of these first.
func (s *service) sync(gone map[netip.Addr]struct{}, conditions map[netip.Addr]model.Conditions, come []model.Endpoint) (changed, removed []*slice) {
	var same []*slice
	for _, slice := range s.slices {
		switch different := slice.sync(gone, conditions); {
		case !different && (len(slice.endpoints) > 0 || len(come) == 0):
			same = append(same, slice)
		case len(slice.endpoints) == 0:
			removed = append(removed, slice)
		default:
			changed = append(changed, slice)
		}
	}
	same, changed, made := distribute(same, changed, come)
	for i, slice := range made {
		if len(made)-i <= len(removed) {
			removed[0].endpoints = slice.endpoints
			slice, removed = removed[0], removed[1:]
		} else {
			slice.name = fmt.Sprintf("%s-%05x", s.object.Name, s.made)
			s.made++
		}
		changed = append(changed, slice)
	}
	s.slices = slices.Concat(same, changed)
	slices.SortFunc(s.slices, func(a, b *slice) int { return cmp.Compare(a.name, b.name) })
	return changed, removed
}

// sync applies rule 1 to a slice, and reports whether the slice has changed.
func (s *slice) sync(gone map[netip.Addr]struct{}, conditions map[netip.Addr]model.Conditions) (different bool) {
	before := len(s.endpoints)
	if len(gone) > 0 {
		s.endpoints = slices.DeleteFunc(s.endpoints, func(e model.Endpoint) bool { _, ok := gone[e.Address]; return ok })
	}
	if len(conditions) > 0 {
		for i := range s.endpoints {
			if c, ok := conditions[s.endpoints[i].Address]; ok && c != s.endpoints[i].Conditions {
				s.endpoints[i].Conditions = c
				different = true
			}
		}
	}
	return different || len(s.endpoints) != before
}

// distribute applies rules 2 and 3 to new endpoints. It moves slices that they fill from same to
// changed, and returns new slices without names.
func distribute(same, changed []*slice, come []model.Endpoint) (stillSame, nowChanged, made []*slice) {
	fill := func(slice *slice) {
		n := min(len(come), sliceSize-len(slice.endpoints))
		slice.endpoints = append(slice.endpoints, come[:n]...)
		come = come[n:]
	}
	fullest := slices.Clone(changed)
	slices.SortStableFunc(fullest, func(a, b *slice) int { return cmp.Compare(len(b.endpoints), len(a.endpoints)) })
	for _, slice := range fullest {
		fill(slice)
	}
	for len(come) > 0 {
		if into := bestFit(same, len(come)); into >= 0 {
			changed = append(changed, same[into])
			fill(same[into])
			same = slices.Delete(same, into, into+1)
		} else {
			made = append(made, &slice{})
			fill(made[len(made)-1])
		}
	}
	if len(changed)+len(same)+len(made) == 0 { // a Service has at least one slice
		made = append(made, &slice{})
	}
	return same, changed, made
}

// bestFit returns the index of the slice that the endpoints fill best without exceeding sliceSize,
// or -1 if there is none.
func bestFit(among []*slice, endpoints int) int {
	best, left := -1, sliceSize
	for i, slice := range among {
		if room := sliceSize - len(slice.endpoints) - endpoints; room >= 0 && room < left {
			best, left = i, room
		}
	}
	return best
}
