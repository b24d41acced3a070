// Package intern keeps one copy of each string that many objects have in common: names of nodes, zones and ports. A state
// of a hundred thousand endpoints has a few thousand of them.
package intern

import "sync"

// generation is how many strings Strings holds before it starts to forget those no longer seen.
const generation = 1 << 16

// longest is how long a string is at most, in bytes, to be kept: the keys of labels are the longest that objects have in common. Others
// may come from a decoder that refuses them later.
const longest = 253 + 1 + 63

// Strings is a set of strings that are in use, for any number of goroutines; the zero value is ready. Package unique would
// forget them at each garbage collection, as the model holds plain strings and no handles.
type Strings struct {
	mu         sync.Mutex
	young, old map[string]string
}

// Get gives the copy that all callers share; of a very long string, the string itself.
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
