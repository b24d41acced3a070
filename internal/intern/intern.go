// Package intern keeps one copy of each string that many objects have in common, such as the names
// of nodes, zones and ports. A state of a hundred thousand endpoints has a few thousand such
// strings.
package intern

import "sync"

// generation is the number of new strings after which Strings forgets those that it has not seen
// meanwhile.
const generation = 1 << 16

// longest is the length in bytes up to which a string is kept. The longest strings that objects
// have in common are the keys of labels. Longer ones may come from a decoder that refuses them
// later.
const longest = 253 + 1 + 63

// Strings is a set of strings in use. Any number of goroutines may use it, and the zero value is
// ready to use. Package unique is no replacement: it would forget a string at each garbage
// collection, because the model holds plain strings and no handles.
//
// Invariants, while mu is not held:
//
//  1. young contains the strings seen since the last rotation, at most generation of them.
//  2. old contains the strings seen between the last two rotations. At a rotation, old is dropped
//     and young becomes old.
type Strings struct {
	mu         sync.Mutex // guards young and old
	young, old map[string]string
}

// Get returns the copy of s that all callers share. It returns s itself if s is too long to be
// kept.
func (i *Strings) Get(s string) string {
	if s == "" || len(s) > longest {
		return s
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if v, ok := i.young[s]; ok {
		return v
	}
	if v, ok := i.old[s]; ok {
		s = v
	}
	if i.young == nil || len(i.young) == generation {
		i.old, i.young = i.young, map[string]string{}
	}
	i.young[s] = s
	return s
}
