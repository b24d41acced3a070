// Package nft speaks with nf_tables over agent/netlink: tables, chains, sets and their elements,
// rules, transactions, reading back what the kernel holds, and notifications of what others change.
// It knows nothing of Services. The programmers for nftables and IPVS build on it.
//
// Expressions are the types of github.com/google/nftables/expr, which also encodes them. Rules are
// few, so that costs nothing. Everything else of that library allocates several objects for each
// element, sends one message at a time and does not report whether what it reads is complete
// (BenchmarkProgrammer of agent/programmer/nftables, Load and Restart).
package nft

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
)

// headerLen is the length of a message's headers, nlmsghdr and nfgenmsg, in bytes. genLen is that
// of the latter.
const (
	genLen    = 4
	headerLen = unix.NLMSG_HDRLEN + genLen
)

// Conn is a socket for nf_tables. Only one goroutine uses it at a time, except for Watch.
type Conn struct {
	*netlink.Socket
	// Watcher receives notifications about what others do over other sockets.
	Watcher *netlink.Watcher
}

// Dial opens a socket. Its Watcher is not open yet.
func Dial() (*Conn, error) {
	s, err := netlink.Open(unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, err
	}
	return &Conn{s, netlink.NewWatcher(unix.NETLINK_NETFILTER, s.Port, unix.NFNLGRP_NFTABLES)}, nil
}

// Close closes the socket and the Watcher.
func (c *Conn) Close() {
	c.Watcher.Close()
	c.Socket.Close()
}

// Batch is a transaction. All of its messages take effect at once, or none does.
type Batch struct {
	Messages
}

// NewBatch begins a transaction that changes a table.
func NewBatch(t Table) *Batch {
	b := &Batch{}
	b.Reset(t)
	return b
}

// Reset begins a transaction that changes a table, in the memory of the previous one.
func (b *Batch) Reset(t Table) {
	b.Table, b.Buf = t, b.Buf[:0]
	b.End(b.header(unix.NFNL_MSG_BATCH_BEGIN))
}

// header begins a message that delimits a transaction.
func (b *Batch) header(kind uint16) (at int) {
	at = b.Begin(kind, 0)
	b.Buf = binary.BigEndian.AppendUint16(append(b.Buf, unix.AF_UNSPEC, unix.NFNETLINK_V0), unix.NFNL_SUBSYS_NFTABLES)
	return at
}

// Fits reports whether the kernel accepts a transaction of this length.
func (c *Conn) Fits(b *Batch) bool { return len(b.Buf)+headerLen <= c.Limit }

// PartLength is the length in bytes of transactions that do not hold up anything else on the
// machine, about two hundred elements. A kernel without preemption runs no other thread on the
// CPU until a transaction is complete. That takes about a millisecond for this length, and more
// than a second for the largest clusters as a whole.
const PartLength = 1 << 13

// CommitParts commits messages that need not take effect at once, in transactions of up to the
// given length. A longer message has a transaction of its own.
func (c *Conn) CommitParts(m *Messages, length int) error {
	length = min(length, c.Limit)
	all := func() (done uint32, err error) {
		b, rest := NewBatch(m.Table), m.Buf
		for len(rest) > 0 {
			next := int(binary.NativeEndian.Uint32(rest))
			if len(b.Buf) > headerLen && len(b.Buf)+next+headerLen > length {
				if err := c.transact(b, true); err != nil {
					return done, err
				}
				done++
				b.Reset(m.Table)
			}
			b.Buf = append(b.Buf, rest[:next]...)
			rest = rest[next:]
		}
		if len(b.Buf) == headerLen {
			return done, nil
		}
		if err = c.transact(b, true); err == nil {
			done++
		}
		return done, err
	}
	if len(m.Buf) > largeChange {
		return c.Watcher.Deaf(c.Generation, all)
	}
	_, err := all()
	return err
}

// largeChange is the length in bytes, about two thousand elements, above which a change is better
// committed without notifications.
const largeChange = 1 << 17

// Commit commits a transaction, unless it is empty. A netlink.Error means that it had no effect.
func (c *Conn) Commit(b *Batch) error {
	if len(b.Buf) <= largeChange {
		return c.transact(b, true)
	}
	return c.Watcher.Deaf(c.Generation, func() (uint32, error) {
		if err := c.transact(b, true); err != nil {
			return 0, err
		}
		return 1, nil
	})
}

// Check lets the kernel validate a transaction without committing it.
func (c *Conn) Check(b *Batch) error { return c.transact(b, false) }

func (c *Conn) transact(b *Batch, commit bool) error {
	if len(b.Buf) <= headerLen {
		return nil
	}
	if !c.Fits(b) {
		return &netlink.Error{Errno: unix.EMSGSIZE}
	}
	answered := len(b.Buf)
	if commit { // without the end message, the kernel rolls the batch back
		b.End(b.header(unix.NFNL_MSG_BATCH_END))
	}
	var refused *netlink.Error
	err := c.Transact(b.Buf, answered, func(i int, err *netlink.Error) {
		if refused == nil {
			refused = err
			refused.Operation = operationAt(b.Buf, i)
		}
	})
	if refused != nil { // then nothing has taken effect, even if further answers were lost
		return refused
	}
	return err
}

// operations describes each type of message that changes something.
var operations = map[uint16]string{
	unix.NFT_MSG_NEWTABLE: "add table", unix.NFT_MSG_DELTABLE: "remove table",
	unix.NFT_MSG_NEWCHAIN: "add chain", unix.NFT_MSG_DELCHAIN: "remove chain",
	unix.NFT_MSG_NEWRULE: "add a rule of chain", unix.NFT_MSG_DELRULE: "remove the rules of chain",
	unix.NFT_MSG_NEWSET: "add set", unix.NFT_MSG_DELSET: "remove set",
	unix.NFT_MSG_NEWSETELEM: "add elements of set", unix.NFT_MSG_DELSETELEM: "remove elements of set",
}

// operationAt returns what the ith message is to do.
func operationAt(b []byte, i int) string {
	for m := range netlink.Messages(b) {
		if i == 0 {
			return operation(m)
		}
		i--
	}
	return ""
}

// operation returns what a message does, or "" if it changes nothing.
func operation(m netlink.Message) string {
	if m.Kind>>8 != unix.NFNL_SUBSYS_NFTABLES || operations[m.Kind&0xff] == "" {
		return ""
	}
	kind := m.Kind & 0xff
	name := unix.NFTA_SET_NAME // has the value of NFTA_RULE_CHAIN and NFTA_SET_ELEM_LIST_SET
	switch kind {
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
		name = unix.NFTA_CHAIN_NAME
	case unix.NFT_MSG_NEWTABLE, unix.NFT_MSG_DELTABLE:
		name = unix.NFTA_TABLE_NAME
	}
	return operations[kind] + " " + netlink.Text(netlink.Attribute(m.Attributes(genLen), uint16(name)))
}

// Watch calls lost when others have changed one of the tables, until ctx ends. See
// netlink.Watcher.Watch.
func (c *Conn) Watch(
	ctx context.Context, pause time.Duration, tables []Table, lost func(reason string), failed func(error),
) {
	c.Watcher.Watch(ctx, pause, func(m netlink.Message) string { return foreign(m, tables) }, lost, failed)
}

// foreign returns what a notification says about a change of one of the tables, or "".
func foreign(m netlink.Message, tables []Table) string {
	for _, t := range tables {
		if len(m.Body) < genLen || m.Body[0] != t.Number ||
			netlink.Text(netlink.Attribute(m.Attributes(genLen), unix.NFTA_TABLE_NAME)) != t.Name {
			continue
		}
		if did := operation(m); did != "" {
			return fmt.Sprintf("another process changed the %v table: %s", t.IP, did)
		}
	}
	return ""
}

// Generation returns the generation number of the ruleset, which each transaction increases by one,
// whichever table it changes.
func (c *Conn) Generation() (generation uint32, err error) {
	err = c.Get(request(unix.NFT_MSG_GETGEN, unix.AF_UNSPEC), func(m netlink.Message) {
		generation = netlink.BigUint32(netlink.Attribute(m.Attributes(genLen), unix.NFTA_GEN_ID))
	})
	if err != nil {
		return 0, fmt.Errorf("read the generation of nf_tables: %w", err)
	}
	return generation, nil
}

// RemoveTable removes a table if it exists, without misleading packets that are in its rules.
func (c *Conn) RemoveTable(t Table) error {
	if exists, err := c.RemoveRules(t); err != nil || !exists {
		return err
	}
	m := Messages{Table: t}
	m.RemoveTable()
	_, err := c.commitTo(&m)
	return err
}

// RemoveRules removes the rules of a table if it exists, and waits until no packet is in them any
// more. The rules cannot be removed together with the table. For a packet that is in the rules at
// that moment, the maps would be empty but the sets would not. So the port of a Service would be
// refused as another port of its cluster IP.
func (c *Conn) RemoveRules(t Table) (exists bool, err error) {
	m := Messages{Table: t}
	m.RemoveRules("")
	if exists, err = c.commitTo(&m); exists {
		Grace()
	}
	return exists, err
}

// commitTo commits messages about a table. exists is false if there is no such table, or if the
// kernel lacks nf_tables or the IP family.
func (c *Conn) commitTo(m *Messages) (exists bool, err error) {
	err = c.Commit(m.Batch())
	if isAny(err, unix.ENOENT, unix.EOPNOTSUPP, unix.EAFNOSUPPORT) {
		return false, nil
	}
	return err == nil, err
}

func isAny(err error, of ...unix.Errno) bool {
	return slices.ContainsFunc(of, func(errno unix.Errno) bool { return errors.Is(err, errno) })
}

// Grace waits until every packet that is in the kernel's rules at the time of the call has left
// them.
//
// A packet in a chain of nftables passes the rules that the chain had when the packet entered it. A
// lookup in a set or map, however, finds the content of that moment. So a rule that refuses packets
// which a map does not have must be removed before the map, with a Grace in between, and not in the
// same transaction.
func Grace() {
	const global = 1 // MEMBARRIER_CMD_GLOBAL, which waits for an RCU grace period
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, global, 0, 0); errno != 0 {
		<-time.After(50 * time.Millisecond) // a kernel with nohz_full CPUs lacks this command
	}
}
