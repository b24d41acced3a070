package source

import "sync"

// generation is how many strings an interner holds before it starts to forget those no longer seen.
const generation = 1 << 16

// interner keeps one copy of each string that occurs in many objects: node names, zones, port names. Package unique
// would forget them at each garbage collection, as the model holds plain strings and no handles.
type interner struct {
	mu         sync.Mutex
	young, old map[string]string
}

func (i *interner) get(s string) string {
	if s == "" {
		return ""
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

func (i *interner) deref(s *string) string {
	if s == nil {
		return ""
	}
	return i.get(*s)
}
