package generate

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/internal/model"
)

// sliceSize is how many endpoints a slice has at most: the EndpointSlice controller's default.
const sliceSize = 100

// portName is the name of the only port that Services have.
const portName = "http"

// service is a Service and its slices.
type service struct {
	object *model.Service
	slices []*slice
	// wanted is how many endpoints it has, or will have when it is scaled.
	wanted int
	// made is how many slices there ever were, for their names.
	made int
}

// slice is one of a Service's slices. One without endpoints has no ports, as the controller keeps a Service that has no pods.
type slice struct {
	name      string
	endpoints []model.Endpoint
	// triggerMS is when it changed last; 0: it has not.
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

// sync has a Service's slices hold its pods after some have gone, changed their conditions or come, by the rules of the
// EndpointSlice controller's reconciler: what goes and what changes is changed where it is; slices that change anyway are
// filled up, the fullest first; what is then left goes into the slice that it fills best, or into new ones. Slices that
// would be removed take the place of new ones, the last of these first. It gives the slices that are different, and those removed.
func (s *service) sync(gone map[netip.Addr]struct{}, conditions map[netip.Addr]model.Conditions, come []model.Endpoint) (changed, removed []*slice) {
	var same, emptied []*slice
	for _, slice := range s.slices {
		before := len(slice.endpoints)
		different := before == 0 && len(come) > 0
		if len(gone) > 0 {
			slice.endpoints = slices.DeleteFunc(slice.endpoints, func(e model.Endpoint) bool { _, ok := gone[e.Address]; return ok })
		}
		if len(conditions) > 0 {
			for i := range slice.endpoints {
				if c, ok := conditions[slice.endpoints[i].Address]; ok && c != slice.endpoints[i].Conditions {
					slice.endpoints[i].Conditions = c
					different = true
				}
			}
		}
		switch {
		case !different && len(slice.endpoints) == before:
			same = append(same, slice)
		case len(slice.endpoints) == 0:
			emptied = append(emptied, slice)
		default:
			changed = append(changed, slice)
		}
	}

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
	var made []*slice
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
	if len(changed)+len(same)+len(made) == 0 { // a Service has one slice at least
		made = append(made, &slice{})
	}
	for i, slice := range made {
		if len(made)-i <= len(emptied) {
			emptied[0].endpoints = slice.endpoints
			slice, emptied = emptied[0], emptied[1:]
		} else {
			slice.name = fmt.Sprintf("%s-%05x", s.object.Name, s.made)
			s.made++
		}
		changed = append(changed, slice)
	}
	s.slices = slices.Concat(same, changed)
	slices.SortFunc(s.slices, func(a, b *slice) int { return cmp.Compare(a.name, b.name) })
	return changed, emptied
}

// bestFit finds the slice that so many endpoints fill best without being too many; -1: there is none.
func bestFit(among []*slice, endpoints int) int {
	best, left := -1, sliceSize
	for i, slice := range among {
		if room := sliceSize - len(slice.endpoints) - endpoints; room >= 0 && room < left {
			best, left = i, room
		}
	}
	return best
}
