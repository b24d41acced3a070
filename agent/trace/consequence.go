package trace

// consequence is what rules may do to a packet that they match.
type consequence struct {
	// accepts means that the packet may not come to the rules after this one.
	accepts        bool
	drops, rejects bool
	// changes means that the packet may be translated, or not be tracked by conntrack.
	changes bool
	// marks are the bits of marks that may change.
	marks uint32
	// chains are those that may be called.
	chains []*chain
}

// add adds another consequence, without its chains.
func (c *consequence) add(o consequence) {
	c.accepts, c.changes = c.accepts || o.accepts, c.changes || o.changes
	c.drops, c.rejects = c.drops || o.drops, c.rejects || o.rejects
	c.marks |= o.marks
}

// refuses reports whether the packet may be dropped or rejected.
func (c *consequence) refuses() bool { return c.drops || c.rejects }

// of adds what steps do.
func (c *consequence) of(steps []step) {
	for _, s := range steps {
		switch s := s.(type) {
		case verdict:
			c.ofResult(s.result)
		case find:
			if s.verdicts {
				for e := range s.set.elements() {
					c.ofResult(e.verdict)
				}
			}
		case xmark:
			c.marks |= s.value | s.mask
		case *connmark, setMark:
			c.marks = ^uint32(0)
		case notrack, dnat, destination:
			c.changes = true
		}
	}
}

func (c *consequence) ofResult(r result) {
	switch r.kind {
	case accept, leave:
		c.accepts = true
	case drop:
		c.drops = true
	case reject:
		c.rejects = true
	case call, jump:
		c.chains = append(c.chains, r.chain)
	}
}

// ofChain returns what all rules of a chain may do, and of the chains that it calls.
func ofChain(c *chain, known map[*chain]*consequence) consequence {
	if k := known[c]; k != nil {
		return *k
	}
	out := &consequence{}
	known[c] = out // the kernel refuses loops; those of a fuzzer end here
	for _, r := range c.rules {
		one, called := r.consequence, r.consequence.chains
		if r.unknown == "" {
			one = consequence{}
			one.of(r.steps)
			called = one.chains
		}
		out.add(one)
		for _, to := range called {
			out.add(ofChain(to, known))
		}
	}
	return *out
}

// refusalsOf adds how the rules of proxies refuse packets in a chain and in those that it calls, as
// far as they can be judged.
func refusalsOf(c *chain, found *consequence, known map[*chain]struct{}) {
	if _, ok := known[c]; ok {
		return
	}
	known[c] = struct{}{}
	for _, r := range c.rules {
		if r.unknown != "" {
			continue // it counts as not matching, and is named
		}
		var one consequence
		one.of(r.steps)
		if c.proxys {
			found.add(one)
		}
		for _, to := range one.chains {
			refusalsOf(to, found, known)
		}
	}
}

// resolve completes the consequences of rules that cannot be judged with those of the chains that
// they lead to, and finds the base chains that may change what a proxy's rules do.
func (r *Rules) resolve() {
	known := map[*chain]*consequence{}
	proxys, all := r.askedMarks()
	for _, c := range r.chains {
		for _, rule := range c.rules {
			for _, to := range rule.consequence.chains {
				rule.consequence.add(ofChain(to, known))
			}
			rule.alters = rule.consequence.changes || rule.consequence.marks&proxys != 0
			rule.decides = rule.consequence.refuses() || rule.consequence.marks&all != 0
		}
	}
	for _, b := range r.bases {
		of := ofChain(b.chain, known)
		b.alters = of.changes || of.marks&proxys != 0
	}
}

// askedMarks returns the bits of marks that rules of proxies ask, and those that any rule asks.
func (r *Rules) askedMarks() (proxys, all uint32) {
	for _, c := range r.chains {
		for _, rule := range c.rules {
			all |= rule.asksMark
			if c.proxys {
				proxys |= rule.asksMark
			}
		}
	}
	if r.balancer != nil {
		for k := range r.balancer.services {
			proxys |= k.mark
		}
	}
	return proxys, all | proxys
}
