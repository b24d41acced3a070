package ipvs

import (
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// Table is the name of each family's nftables table.
const Table = "slicecast-ipvs"

func tableOf(family model.Family) nft.Table {
	return nft.Table{Family: nft.FamilyOf(family), Name: Table}
}

// Serves reports whether a run of this programmer has left a table that serves an IP family.
func Serves(family model.Family) (bool, error) { return nft.HasChain(family, Table, inputChain) }

// layout describes a family's table: its sets, and its rules as long as the node does not change.
type layout struct {
	nft.Table
	sets    [setCount]set
	node    view.Node
	masqBit uint32
}

type set struct {
	name string
	nft.Definition
}

// setID identifies one of the table's sets and maps.
type setID int

// The maps by class come first. Those for addresses have the keys address, protocol and port. Those
// for NodePorts have the keys protocol and port.
const (
	setNodePorts setID = setID(classes) + iota*setID(classes)
	setAddresses
)

const (
	setFiltered setID = setAddresses + 1 + iota
	setSources
	setHealth
	setHairpins
	setServices
	setCount
)

func (c class) frontends() setID { return setID(c) }
func (c class) nodePorts() setID { return setNodePorts + setID(c) }

func newLayout(family model.Family, node view.Node, masqBit uint32) *layout {
	l := &layout{Table: tableOf(family), node: node, masqBit: masqBit}
	address, mark := []nft.Field{l.Address}, []nft.Field{nft.IntegerType}
	nodePort := []nft.Field{nft.ProtoType, nft.PortType}
	frontend := slices.Concat(address, nodePort)
	for c := range classes {
		l.sets[c.frontends()] = set{"from-" + c.String(), nft.Definition{Key: frontend, Data: mark}}
		l.sets[c.nodePorts()] = set{"from-" + c.String() + "-nodeports", nft.Definition{Key: nodePort, Data: mark}}
	}
	l.sets[setAddresses] = set{"addresses", nft.Definition{Key: address}}
	l.sets[setFiltered] = set{"filtered", nft.Definition{Key: frontend}}
	source := slices.Concat(frontend, address)
	l.sets[setSources] = set{"sources", nft.Definition{Key: source, Flags: unix.NFT_SET_INTERVAL}}
	l.sets[setHealth] = set{"health-checks", nft.Definition{Key: frontend}}
	l.sets[setHairpins] = set{"hairpins", nft.Definition{Key: slices.Concat(address, address)}}
	l.sets[setServices] = set{"services", nft.Definition{Key: mark}}
	return l
}

// elementKey identifies an element of one of a table's sets.
type elementKey struct {
	set setID
	key string
}

// element is the content of an element beside its key.
type element struct {
	end     string // the end of an interval; empty in sets without intervals
	mark    uint32
	comment string
}

// elements are the elements of a table.
type elements map[elementKey]element

// readTable returns the elements that the kernel holds. nil means that the table is missing or
// differs so much from what it should be that it must be created again. different says what there
// should be instead. It is empty if not even rules must be written.
func (m *machine) readTable(l *layout) (held elements, different []string, err error) {
	tables, err := m.nft.Tables(l.Family)
	// A table with flags is dormant or has an owner.
	if flags, exists := tables[l.Name]; err != nil || !exists || flags != 0 {
		return nil, []string{fmt.Sprintf("an %v table %s without flags", l.IP, l.Name)}, err
	}
	sets, err := m.nft.Sets(l.Table)
	if err != nil {
		return nil, nil, fmt.Errorf("read the sets of table %s: %w", Table, err)
	}
	for _, s := range l.sets {
		if is, exists := sets[s.name]; !exists || !s.Is(is) {
			return nil, []string{l.Should("a set %s with another definition", s.name)}, nil
		}
	}
	chains, err := m.nft.Chains(l.Table)
	if err != nil {
		return nil, nil, fmt.Errorf("read the chains of table %s: %w", Table, err)
	}
	wanted, foreign := map[string][]nft.Rule{}, false
	for _, c := range l.chains() {
		wanted[c.name] = c.rules
		is := chains[c.name]
		if is == nil || is.Hook == c.hook {
			continue
		}
		different = append(different, l.Should("another hook, priority or policy of chain %s", c.name))
		is.Hook.Drops = false
		foreign = foreign || is.Hook != c.hook
	}
	for name := range chains {
		_, known := wanted[name]
		foreign = foreign || !known
	}
	different = append(different, l.Table.Differences(chains, wanted)...)
	if foreign {
		return nil, different, nil
	}
	held, err = m.readElements(l)
	return held, different, err
}

func (m *machine) readElements(l *layout) (elements, error) {
	held := elements{}
	for id, s := range l.sets {
		err := m.nft.Elements(l.Table, s.name, func(e nft.Element) (isNew bool) {
			before := len(held)
			held[elementKey{setID(id), string(e.Key)}] = element{string(e.End), netlink.Uint32(e.Data), e.Comment}
			return len(held) > before
		})
		if err != nil {
			return nil, fmt.Errorf("read set %s of table %s: %w", s.name, Table, err)
		}
	}
	return held, nil
}

// writeTable makes the table hold the wanted elements, in one transaction.
func (f *family) writeTable(x *change) error {
	b := nft.NewBatch(f.layout.Table)
	switch {
	case !x.rules:
	case x.held == nil:
		f.layout.create(&b.Messages)
	default:
		f.layout.writeRules(&b.Messages)
	}
	f.layout.changeElements(&b.Messages, x.held, x.want)
	if err := f.nft.Commit(b); err != nil {
		return fmt.Errorf("write nftables table %s: %w", Table, err)
	}
	return nil
}

// create creates the table in place of what exists.
func (l *layout) create(m *nft.Messages) {
	m.AddTable() // so that removing it does not fail
	m.RemoveTable()
	m.AddTable()
	for _, s := range l.sets {
		m.AddSet(s.name, s.Definition)
	}
	l.writeRules(m)
}

// writeRules makes the chains have exactly their rules. Unlike create, it keeps the maps, so that a
// packet in the rules still finds its element.
func (l *layout) writeRules(m *nft.Messages) {
	chains := l.chains()
	for _, c := range chains {
		m.AddChain(c.name, c.hook)
	}
	for _, c := range chains {
		m.SetRules(c.name, c.rules)
	}
}

// changeElements turns held into want. It does not touch elements that are the same in both.
func (l *layout) changeElements(m *nft.Messages, held, want elements) {
	var removed, added [setCount]nft.Elements
	for k, is := range held {
		if becomes, ok := want[k]; !ok || becomes != is {
			k.appendTo(&removed[k.set], element{end: is.end}, nil)
		}
	}
	for k, becomes := range want {
		if is, ok := held[k]; ok && becomes == is {
			continue
		}
		var mark []byte
		if l.sets[k.set].Data != nil {
			mark = nft.Integer(becomes.mark)
		}
		k.appendTo(&added[k.set], becomes, mark)
	}
	for id, s := range l.sets {
		if len(removed[id].Buf) > 0 {
			m.RemoveElements(s.name, &removed[id])
		}
		if len(added[id].Buf) > 0 {
			m.AddElements(s.name, &added[id])
		}
	}
}

func (k elementKey) appendTo(list *nft.Elements, e element, mark []byte) {
	if e.end != "" {
		list.AddInterval([]byte(k.key), []byte(e.end), e.comment)
		return
	}
	list.Add([]byte(k.key), mark, e.comment)
}

// tryTable lets the kernel check a table with all kinds of rules.
func (m *machine) tryTable(family model.Family) error {
	some := []netip.Prefix{nft.FamilyOf(family).Loopback()}
	l := newLayout(family, view.Node{
		Pods: view.PodDetector{Prefixes: some, Interface: "lo", InterfacePrefix: "lo"}, NodePorts: some, ServiceCIDRs: some,
	}, m.options.MasqueradeMark)
	l.Name += "-check"
	b := nft.NewBatch(l.Table)
	l.create(&b.Messages)
	return m.nft.Check(b)
}
