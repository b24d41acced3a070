package ipvs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/userdata"
	mdnetlink "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

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

// tables is the socket for nftables. It serves both families.
type tables struct {
	conn *nftables.Conn
	raw  *mdnetlink.Conn // the socket of conn
	// lists is a separate socket for reading elements, which takes the library several times as long.
	lists    *socket
	requests requests
	// port is the netlink address of conn's socket. Notifications of a change carry the port of the
	// socket that made it.
	port uint32
	// base is the generation number of the ruleset when the last Replace began. own counts the
	// transactions of this socket since then.
	base, own uint32
	// changed means that there is something to write.
	changed bool
}

// wantedTransaction is the longest transaction to ask for, in bytes.
const wantedTransaction = 64 << 20

func dialTables() (*tables, error) {
	t := &tables{}
	var err error
	t.conn, err = nftables.New(nftables.AsLasting(), nftables.WithSockOptions(func(c *mdnetlink.Conn) error {
		t.raw = c
		raw, err := c.SyscallConn()
		if err != nil {
			return err
		}
		var address unix.Sockaddr
		if controlErr := raw.Control(func(fd uintptr) { address, err = unix.Getsockname(int(fd)) }); controlErr != nil || err != nil {
			return errors.Join(controlErr, err)
		}
		t.port = address.(*unix.SockaddrNetlink).Pid
		return errors.Join(c.SetWriteBuffer(wantedTransaction), c.SetReadBuffer(wantedTransaction))
	}))
	if err != nil {
		return nil, err
	}
	if t.lists, err = dial(unix.NETLINK_NETFILTER); err != nil {
		return nil, errors.Join(err, t.conn.CloseLasting())
	}
	return t, nil
}

func (t *tables) close() {
	_ = t.conn.CloseLasting() // there is no remedy
	t.lists.close()
}

// maxReads is how often a table or a list of addresses is read if others change something
// meanwhile.
const maxReads = 10

// read returns the elements that the kernel holds. nil means that the table is missing or differs
// from what it should be, so that it must be created again. whole is false if at least the rules
// must be written. If others keep changing the ruleset, two reads with the same result are
// accepted.
func (t *tables) read(l *layout) (held elements, whole bool, err error) {
	var last elements
	var lastWhole bool
	for i := range maxReads {
		before, err := t.generation()
		if err != nil {
			return nil, false, err
		}
		held, whole, err = t.readOnce(l)
		if err != nil {
			return nil, false, err
		}
		after, err := t.generation()
		if err != nil {
			return nil, false, err
		}
		if before == after || i > 0 && whole == lastWhole && maps.Equal(held, last) {
			return held, whole, nil
		}
		last, lastWhole = held, whole
	}
	return nil, false, fmt.Errorf("the nftables ruleset changed each of the %d times that it was read", maxReads)
}

// generation returns the generation number of the ruleset, which each change increases. What is
// read during a change may be incomplete, and the library does not report that.
func (t *tables) generation() (uint32, error) {
	if err := t.dropAnswers(); err != nil {
		return 0, err
	}
	answer, err := t.raw.Execute(mdnetlink.Message{
		Header: mdnetlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN, Flags: mdnetlink.Request},
		Data:   make([]byte, 4),
	})
	if err != nil || len(answer) == 0 {
		return 0, fmt.Errorf("ask for nftables' generation: %w", err)
	}
	attributes, err := mdnetlink.UnmarshalAttributes(answer[0].Data[4:])
	if err != nil || len(attributes) == 0 || len(attributes[0].Data) != 4 {
		return 0, fmt.Errorf("read nftables' generation: %w", err)
	}
	return binary.BigEndian.Uint32(attributes[0].Data), nil // the attribute NFTA_GEN_ID
}

// dropAnswers discards what is left of the answers to earlier requests. If something fails, the
// library leaves some unread, and each later request would receive the answer to its predecessor.
// The kernel answers inside the call that sends a request, so no old answer can arrive later.
func (t *tables) dropAnswers() error {
	raw, err := t.raw.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		for buf := make([]byte, 1); failed == nil || errors.Is(failed, unix.EINTR) || errors.Is(failed, unix.ENOBUFS); {
			_, _, failed = unix.Recvfrom(int(fd), buf, unix.MSG_DONTWAIT)
		}
	})
	if errors.Is(failed, unix.EAGAIN) {
		failed = nil // the socket is empty
	}
	return errors.Join(err, os.NewSyscallError("receive from netlink", failed))
}

// begin starts the period for which othersWrote reports changes.
func (t *tables) begin() (err error) {
	t.base, err = t.generation()
	t.own = 0
	return err
}

// othersWrote reports whether others have written to the ruleset since begin. Each transaction
// increases the generation number by one.
func (t *tables) othersWrote() (bool, error) {
	now, err := t.generation()
	return now != t.base+t.own, err
}

func (t *tables) readOnce(l *layout) (held elements, whole bool, err error) {
	all, err := t.conn.ListTablesOfFamily(l.table.Family)
	if err != nil {
		return nil, false, fmt.Errorf("list nftables tables: %w", err)
	}
	// A table with flags is dormant or has an owner.
	if !slices.ContainsFunc(all, func(t *nftables.Table) bool { return t.Name == Table && t.Flags == 0 }) {
		return nil, false, nil
	}
	chains, err := t.conn.ListChainsOfTableFamily(l.table.Family)
	if err != nil {
		return nil, false, fmt.Errorf("list nftables chains: %w", err)
	}
	sets, err := t.conn.GetSets(l.table)
	if err != nil {
		return nil, false, fmt.Errorf("read the sets of table %s: %w", Table, err)
	}
	for _, want := range l.sets {
		i := slices.IndexFunc(sets, func(s *nftables.Set) bool { return s.Name == want.Name })
		if i < 0 || sets[i].KeyType.Bytes != want.KeyType.Bytes || sets[i].IsMap != want.IsMap || sets[i].Interval != want.Interval {
			return nil, false, nil
		}
	}
	held = elements{}
	for id, s := range l.sets {
		if err := t.readElements(l, setID(id), held); err != nil {
			return nil, false, fmt.Errorf("read set %s of table %s: %w", s.Name, Table, err)
		}
	}
	wanted, there := l.chains(), 0
	for _, h := range chains {
		if h.Table.Name != Table {
			continue
		}
		i := slices.IndexFunc(wanted, func(c chain) bool { return c.name == h.Name })
		if i < 0 || !wanted[i].hookedAs(h) {
			return nil, false, nil
		}
		if h.Policy == nil || *h.Policy == nftables.ChainPolicyAccept {
			there++
		}
	}
	whole = there == len(wanted)
	for _, c := range wanted {
		if !whole {
			break
		}
		rules, err := t.conn.GetRules(l.table, &nftables.Chain{Table: l.table, Name: c.name})
		if err != nil {
			return nil, false, fmt.Errorf("read chain %s of table %s: %w", c.name, Table, err)
		}
		whole = slices.EqualFunc(rules, c.rules, func(held *nftables.Rule, want rule) bool {
			return string(held.UserData) == string(want.userData(l.table.Family))
		})
	}
	return held, whole, nil
}

const attrKeyEnd = 10 // NFTA_SET_ELEM_KEY_END

// readElements adds the elements of a set. For each message, the kernel walks the hash table again
// and skips as many elements as it sent before. If the table is resized meanwhile, which it is for
// a while after large changes, some elements are left out and as many are sent twice. The set is
// then read again.
func (t *tables) readElements(l *layout, id setID, to elements) error {
	before := len(to)
	for range maxReads {
		r := &t.requests
		r.reset()
		r.begin(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETSETELEM, 0)
		r.buf = append(r.buf, byte(l.table.Family), unix.NFNETLINK_V0, 0, 0)
		r.text(unix.NFTA_SET_ELEM_LIST_TABLE, Table)
		r.text(unix.NFTA_SET_ELEM_LIST_SET, l.sets[id].Name)
		r.end()
		given := 0
		err := t.lists.dump(r, func(body []byte) {
			if len(body) < 4 {
				return
			}
			for kind, list := range attributes(body[4:]) {
				if kind != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
					continue
				}
				for _, e := range attributes(list) {
					key, value := parseElement(e)
					to[elementKey{id, key}] = value
					given++
				}
			}
		})
		if errors.Is(err, netlink.ErrDumpInterrupted) {
			continue
		}
		if err != nil || given == len(to)-before {
			return err
		}
	}
	return fmt.Errorf("it changed each of the %d times that it was read", maxReads)
}

func parseElement(b []byte) (key string, e element) {
	for kind, value := range attributes(b) {
		switch kind {
		case unix.NFTA_SET_ELEM_KEY:
			key = string(dataOf(value))
		case attrKeyEnd:
			e.end = string(dataOf(value))
		case unix.NFTA_SET_ELEM_DATA:
			if mark := dataOf(value); len(mark) == 4 {
				e.mark = binary.BigEndian.Uint32(mark)
			}
		case unix.NFTA_SET_ELEM_USERDATA:
			e.comment = commentOf(value)
		}
	}
	return key, e
}

// commentOf returns the comment in an element's user data, or "". The user data of this package's
// elements consist of a type, a length, and the comment with a zero at its end.
func commentOf(userData []byte) string {
	if len(userData) < 3 || userData[0] != byte(userdata.NFTNL_UDATA_SET_ELEM_COMMENT) || int(userData[1]) != len(userData)-2 {
		return ""
	}
	return string(userData[2 : len(userData)-1])
}

// dataOf returns the value in an attribute of nftables' data.
func dataOf(b []byte) []byte {
	for kind, value := range attributes(b) {
		if kind == unix.NFTA_DATA_VALUE {
			return value
		}
	}
	return nil
}

// hookedAs reports whether the kernel calls the held chain where this one should be called.
func (c *chain) hookedAs(held *nftables.Chain) bool {
	if c.hook == nil || held.Hooknum == nil || held.Priority == nil {
		return c.hook == nil && held.Hooknum == nil
	}
	return c.kind == held.Type && *c.hook == *held.Hooknum && c.priority == *held.Priority
}

// create creates the table in place of what exists. It takes effect with the next write.
func (t *tables) create(l *layout) error {
	t.conn.AddTable(l.table) // so that deleting it does not fail
	t.conn.DelTable(l.table)
	t.conn.AddTable(l.table)
	for _, s := range l.sets {
		s.ID = 0
		if err := t.conn.AddSet(s, nil); err != nil {
			return fmt.Errorf("make set %s: %w", s.Name, err)
		}
	}
	t.writeRules(l)
	return nil
}

// writeRules makes the chains have exactly their rules. It takes effect with the next write. Unlike
// create, it keeps the maps, so that a packet in the rules still finds its element.
func (t *tables) writeRules(l *layout) {
	t.changed = true
	chains, accept := l.chains(), nftables.ChainPolicyAccept
	for _, c := range chains {
		made := &nftables.Chain{Table: l.table, Name: c.name}
		if c.hook != nil {
			made.Type, made.Hooknum, made.Priority, made.Policy = c.kind, c.hook, &c.priority, &accept
		}
		t.conn.AddChain(made)
		t.conn.FlushChain(made)
	}
	for _, c := range chains {
		for _, r := range c.rules {
			t.conn.AddRule(&nftables.Rule{
				Table: l.table, Chain: &nftables.Chain{Table: l.table, Name: c.name}, Exprs: r.exprs, UserData: r.userData(l.table.Family),
			})
		}
	}
}

// messageElements is the number of elements in one message. Their list must stay below 64 KiB.
const messageElements = 128

// change adds to the next write what turns held into want. It does not touch elements that are the
// same in both.
func (t *tables) change(l *layout, held, want elements) error {
	var removed, added [setCount][]nftables.SetElement
	for k, is := range held {
		if becomes, ok := want[k]; !ok || becomes != is {
			removed[k.set] = append(removed[k.set], l.element(k, is))
		}
	}
	for k, becomes := range want {
		if is, ok := held[k]; !ok || becomes != is {
			added[k.set] = append(added[k.set], l.element(k, becomes))
		}
	}
	for id, s := range l.sets {
		t.changed = t.changed || len(removed[id])+len(added[id]) > 0
		for part := range slices.Chunk(removed[id], messageElements) {
			if err := t.conn.SetDeleteElements(s, part); err != nil {
				return fmt.Errorf("remove elements of set %s: %w", s.Name, err)
			}
		}
		for part := range slices.Chunk(added[id], messageElements) {
			if err := t.conn.SetAddElements(s, part); err != nil {
				return fmt.Errorf("add elements to set %s: %w", s.Name, err)
			}
		}
	}
	return nil
}

func (l *layout) element(k elementKey, e element) nftables.SetElement {
	made := nftables.SetElement{Key: []byte(k.key), KeyEnd: []byte(e.end), Comment: e.comment}
	if l.sets[k.set].IsMap {
		made.Val = binary.BigEndian.AppendUint32(nil, e.mark)
	}
	return made
}

// write commits everything in one transaction.
func (t *tables) write() error {
	changed := t.changed
	t.changed = false
	if err := t.dropAnswers(); err != nil { // left by requests for the other IP family
		return err
	}
	if err := t.conn.Flush(); err != nil {
		return fmt.Errorf("write nftables table %s: %w", Table, err)
	}
	if changed {
		t.own++
	}
	return nil
}
