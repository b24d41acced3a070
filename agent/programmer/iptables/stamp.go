package iptables

import (
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/xtables"
)

// stamp is what the kernel reports about its tables at little cost. If two stamps differ, something
// was changed.
type stamp struct {
	// generation counts the changes of nf_tables, in all of its tables.
	generation uint32
	// legacy holds the sizes of IPv4's and IPv6's tables.
	legacy [2][tables]xtables.Size
}

// follows reports whether s may be the stamp after this number of commits by this package since an
// earlier stamp, without any change by others. For the legacy variant, that is known of base chains
// only.
func (s stamp) follows(earlier stamp, commits int) bool {
	for f := range s.legacy {
		for t := range tables {
			if s.legacy[f][t].Base != earlier.legacy[f][t].Base {
				return false
			}
		}
	}
	return s.generation-earlier.generation == uint32(commits) || s.generation == 0
}

// stamp returns the current stamp of the tables in use. If that fails, it returns a stamp that
// never follows another one.
func (p *Programmer) stamp() stamp {
	var s stamp
	for family, f := range p.families {
		if err := f.tool.stamp(family, &s); err != nil {
			p.log.Debug("Cannot read the stamp of the tables", "family", family, "err", err)
			p.watch.unreadable++
			return stamp{generation: p.watch.unreadable << 16}
		}
	}
	return s
}

// stamp sets what s holds of a family.
func (t *tool) stamp(family model.Family, s *stamp) (err error) {
	if t.variant == NFT {
		s.generation, err = nft.Generation()
		return err
	}
	index := 0
	if family == model.IPv6 {
		index = 1
	}
	for table := range tables {
		if s.legacy[index][table], err = xtables.SizeOf(family, table.String()); err != nil {
			return err
		}
	}
	return nil
}
