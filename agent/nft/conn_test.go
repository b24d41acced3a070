// These tests prove that transactions take effect in a real kernel as a whole or not at all, that
// what was written is read back, and that Watch reports what others do.
package nft

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables/expr"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// dial opens a Conn on a host.
func dial(t *testing.T, host *testenv.Host) (c *Conn) {
	t.Helper()
	require.NoError(t, host.Do(func() (err error) {
		c, err = Dial()
		return err
	}))
	t.Cleanup(c.Close)
	return c
}

func newHost(t *testing.T) *testenv.Host { return testenv.NewNetwork(t).AddNode("a").Host }

func run(t *testing.T, host *testenv.Host, commands ...string) {
	t.Helper()
	for _, c := range commands {
		words := strings.Fields(c)
		_, err := host.Run(t.Context(), words[0], words[1:]...)
		require.NoError(t, err, c)
	}
}

var tables = []Table{{FamilyOf(model.IPv4), "t"}, {FamilyOf(model.IPv6), "t"}}

// TestLostAnswers asserts that a transaction fails with the kernel's first error even if the
// kernel's answers do not fit in the socket's buffer, and that the socket works for the next
// transaction. It does not run in parallel, because fdOf needs that.
func TestLostAnswers(t *testing.T) {
	c := dial(t, newHost(t))
	m := &Messages{Table: tables[0]}
	m.AddTable()
	require.NoError(t, c.Commit(m.Batch()))
	require.NoError(t, unix.SetsockoptInt(fdOf(t, c), unix.SOL_SOCKET, unix.SO_RCVBUF, 1))
	m.Buf = nil
	for i := range 1000 {
		m.RemoveChain(fmt.Sprint("none-", i))
	}
	err := c.Commit(m.Batch())
	require.ErrorIs(t, err, unix.ENOENT)
	require.ErrorContains(t, err, "remove chain none-0: no such file")
	before, err := c.Generation()
	require.NoError(t, err)
	m = &Messages{Table: Table{FamilyOf(model.IPv4), "other"}}
	m.AddTable()
	require.NoError(t, c.Commit(m.Batch()))
	after, err := c.Generation()
	require.NoError(t, err)
	require.Equal(t, before+1, after)
}

// fdOf returns the file descriptor of a Conn's socket. No other Conn may be open, because its port
// may be the same in another network namespace.
func fdOf(t *testing.T, c *Conn) int {
	t.Helper()
	for fd := range 1024 {
		protocol, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
		if err != nil || protocol != unix.NETLINK_NETFILTER {
			continue
		}
		if a, err := unix.Getsockname(fd); err == nil {
			if n, ok := a.(*unix.SockaddrNetlink); ok && n.Pid == c.Port {
				return fd
			}
		}
	}
	require.FailNow(t, "there is no such socket")
	return -1
}

// TestTransactions asserts that a transaction takes effect as a whole or not at all, that Check has
// no effect, and that what is too long is refused or split.
func TestTransactions(t *testing.T) {
	t.Parallel()
	c := dial(t, newHost(t))
	chains := func() int {
		held, err := c.Chains(tables[0])
		require.NoError(t, err)
		return len(held)
	}
	m := &Messages{Table: tables[0]}
	m.AddTable()
	for i := range 10 {
		m.AddChain(fmt.Sprint("chain-", i), Hook{})
	}
	require.NoError(t, c.Check(m.Batch()))
	require.ErrorIs(t, c.Commit((&Messages{Table: tables[0]}).Batch()), nil)
	held, err := c.Tables(tables[0].Family)
	require.NoError(t, err)
	require.NotContains(t, held, "t")
	broken := &Messages{Table: tables[0]}
	broken.Append(m)
	broken.AddRule("nowhere", Do(Drop()))
	err = c.Commit(broken.Batch())
	require.EqualError(t, err, "add a rule of chain nowhere: no such file or directory")
	require.EqualError(t, c.Check(broken.Batch()), err.Error())
	c.Limit = len(m.Buf) / 2
	require.ErrorIs(t, c.Commit(m.Batch()), unix.EMSGSIZE)
	before, err := c.Generation()
	require.NoError(t, err)
	require.NoError(t, c.CommitParts(m, c.Limit))
	after, err := c.Generation()
	require.NoError(t, err)
	require.Greater(t, after, before+1)
	require.Equal(t, 10, chains())
}

// TestReadBack asserts that the kernel returns what was written: tables, chains with their rules,
// sets in their form, and elements.
func TestReadBack(t *testing.T) {
	t.Parallel()
	host := newHost(t)
	c := dial(t, host)
	for _, table := range tables {
		nat := Hook{Kind: "nat", Number: unix.NF_INET_POST_ROUTING, Priority: 100}
		definitions := map[string]Definition{
			"set":       {Key: []Field{table.Address}},
			"map":       {Key: []Field{table.Address, ProtoType, PortType}, Data: []Field{IntegerType}},
			"verdicts":  {Key: []Field{IntegerType}, Verdicts: true},
			"limited":   {Key: []Field{IntegerType}, Size: 7},
			"intervals": {Key: []Field{table.Address, PortType}, Flags: unix.NFT_SET_INTERVAL},
			"filled":    {Key: []Field{IntegerType}, Data: []Field{IntegerType}, Flags: unix.NFT_SET_EVAL | unix.NFT_SET_TIMEOUT, Size: 9},
		}
		rules := append(table.Refuse("", table.InPrefix(table.Source, expr.CmpOpEq, table.Loopback())),
			Do(table.Frontend(0), LookupInteger("map", 0, 0), LookupChain("verdicts")).Because("a reason"),
			Do(table.Source(0), In("set"), Masquerade()), Do(table.Destination(0), NotIn("set"), Drop()))
		m := &Messages{Table: table}
		m.AddTable()
		for name, d := range definitions {
			m.AddSet(name, d)
		}
		m.AddChain("based", nat)
		m.AddChain("other", Hook{})
		m.SetRules("other", rules[:len(rules)-2])
		m.SetRules("based", rules[len(rules)-2:len(rules)-1])
		require.NoError(t, c.Commit(m.Batch()))
		m.Buf = nil
		m.AddRule("other", rules[len(rules)-1])
		m.InsertRule("other", rules[len(rules)-1])
		require.NoError(t, c.Commit(m.Batch()))

		held, err := c.Tables(table.Family)
		require.NoError(t, err)
		require.Equal(t, map[string]uint32{"t": 0}, held)
		chains, err := c.Chains(table)
		require.NoError(t, err)
		hashes := Hashes(rules, table.Family)
		last := hashes[len(hashes)-1]
		require.Equal(t, map[string]*HeldChain{
			"based": {nat, hashes[len(hashes)-2 : len(hashes)-1]},
			"other": {Hook{}, append(append([]uint64{last}, hashes[:len(hashes)-2]...), last)},
		}, chains)
		sets, err := c.Sets(table)
		require.NoError(t, err)
		require.Len(t, sets, len(definitions))
		for name := range definitions {
			for other, d := range definitions {
				require.Equal(t, name == other, d.Is(sets[name]), "%s as %s", name, other)
			}
		}
		listed, err := host.Run(t.Context(), "nft", "list", "ruleset")
		require.NoError(t, err)
		require.Contains(t, listed, `comment "a reason"`)
	}
}

// TestElements asserts that the elements that are read are those that were added and not removed,
// however many there are.
func TestElements(t *testing.T) {
	t.Parallel()
	c := dial(t, newHost(t))
	rapid.Check(t, func(t *rapid.T) {
		table := rapid.SampledFrom(tables).Draw(t, "table")
		m := &Messages{Table: table}
		m.AddTable()
		m.RemoveTable()
		m.AddTable()
		m.AddChain("chain", Hook{})
		form := rapid.SampledFrom([]string{"set", "map", "verdicts", "intervals"}).Draw(t, "form")
		d := Definition{Key: []Field{IntegerType, PortType}}
		switch form {
		case "map":
			d.Data = []Field{table.Address, PortType}
		case "verdicts":
			d.Verdicts = true
		case "intervals":
			d.Flags = unix.NFT_SET_INTERVAL
		}
		m.AddSet(form, d)
		count := rapid.SampledFrom([]int{0, 1, 10, 5000}).Draw(t, "elements")
		add, remove := &Elements{}, &Elements{}
		want := map[string]Element{}
		for i := range count {
			e := Element{Key: binary.BigEndian.AppendUint32(Integer(uint32(i)), 80<<16)}
			if i%20 == 0 {
				e.Comment = strings.Repeat("x", 1+i%MaxComment)
			}
			switch form {
			case "map":
				e.Data = bytes.Repeat([]byte{byte(i), byte(i >> 8)}, (table.Address.Length+4)/2)
			case "verdicts":
				e.Chain, e.Comment = "chain", ""
				add.AddChain(e.Key, e.Chain)
			case "intervals":
				e.End = binary.BigEndian.AppendUint32(Integer(uint32(i)), 90<<16)
				add.AddInterval(e.Key, e.End, e.Comment)
			}
			if form == "set" || form == "map" {
				add.Add(e.Key, e.Data, e.Comment)
			}
			if i%3 == 1 && form != "intervals" {
				remove.Add(e.Key, nil, "")
				continue
			}
			want[string(e.Key)] = e
		}
		require.GreaterOrEqual(t, add.Length(), len(add.Buf))
		m.AddElements(form, add)
		require.NoError(t, c.Commit(m.Batch()))
		m.Buf = nil
		m.RemoveElements(form, remove)
		require.NoError(t, c.Commit(m.Batch()))
		held := map[string]Element{}
		require.NoError(t, c.Elements(table, form, func(e Element) bool {
			require.True(t, d.HasForm(e))
			_, again := held[string(e.Key)]
			held[string(e.Key)] = Element{
				Key: slices.Clone(e.Key), End: slices.Clone(e.End), Data: slices.Clone(e.Data), Chain: e.Chain, Comment: e.Comment,
			}
			return !again
		}))
		require.Equal(t, want, held)
	})
}

// TestWatch asserts that Watch reports what others do to the tables, and neither what they do
// elsewhere nor what the Conn does itself, however large it is.
func TestWatch(t *testing.T) {
	t.Parallel()
	host := newHost(t)
	c := dial(t, host)
	require.NoError(t, host.Do(c.Watcher.Open))
	lost := make(chan string, 100)
	ctx, cancel := context.WithCancel(t.Context())
	var wait sync.WaitGroup
	wait.Go(func() {
		c.Watch(ctx, time.Minute, tables, func(reason string) { lost <- reason }, func(err error) { t.Error(err) })
	})
	defer wait.Wait()
	defer cancel()
	m := &Messages{Table: tables[0]}
	m.AddTable()
	m.AddSet("s", Definition{Key: []Field{IntegerType}})
	e := &Elements{}
	for i := range 10000 {
		e.Add(Integer(uint32(i)), nil, "")
	}
	m.AddElements("s", e)
	require.Greater(t, len(m.Buf), largeChange)
	require.NoError(t, c.Commit(m.Batch()))
	run(t, host, "nft add table ip other", "nft add chain ip other t", "nft add table ip6 other", "nft delete table ip other")
	for _, test := range []struct{ command, want string }{
		{"nft add chain ip t c", "another process changed the IPv4 table: add chain c"},
		{"nft add element ip t s { 90000 }", "another process changed the IPv4 table: add elements of set s"},
		{"nft add table ip6 t", "another process changed the IPv6 table: add table t"},
		{"nft add rule ip t c drop", "another process changed the IPv4 table: add a rule of chain c"},
		{"nft delete table ip6 t", "another process changed the IPv6 table: remove table t"},
	} {
		run(t, host, test.command)
		select {
		case reason := <-lost:
			require.Equal(t, test.want, reason)
		case <-time.After(10 * time.Second):
			require.Fail(t, "nobody noticed", test.command)
		}
	}
	// Others change something while the Conn commits a large transaction.
	require.NoError(t, c.Watcher.Deaf(c.Generation, func() (uint32, error) {
		run(t, host, "nft add table ip own", "nft delete table ip t")
		return 1, nil
	}))
	require.Contains(t, <-lost, "may have been missed")
	require.Empty(t, lost)
}

// TestRemoveTable asserts that removing a table that does not exist is no error.
func TestRemoveTable(t *testing.T) {
	t.Parallel()
	host := newHost(t)
	c := dial(t, host)
	for range 2 {
		require.NoError(t, c.RemoveTable(tables[0]))
		run(t, host, "nft add table ip other")
		run(t, host, "nft add table ip t", "nft add chain ip t c", "nft add chain ip t d", "nft add rule ip t c jump d")
		require.NoError(t, c.RemoveTable(tables[0]))
		held, err := c.Tables(tables[0].Family)
		require.NoError(t, err)
		require.Equal(t, map[string]uint32{"other": 0}, held)
	}
	require.NoError(t, host.Do(func() error {
		has, err := HasChain(model.IPv4, "t", "c")
		require.False(t, has)
		return err
	}))
}

func TestGeneration(t *testing.T) {
	t.Parallel()
	host := newHost(t)
	generation := func() (g uint32) {
		require.NoError(t, host.Do(func() (err error) {
			g, err = Generation()
			return err
		}))
		return g
	}
	run(t, host, "iptables-nft -t nat -N CHAIN")
	before := generation()
	require.Equal(t, before, generation())
	run(t, host, "iptables-nft -t nat -A CHAIN -j RETURN", "ip6tables-nft -N CHAIN")
	require.Equal(t, before+2, generation())
	run(t, host, "nft flush ruleset", "iptables-nft-save")
	require.Equal(t, before+3, generation())
}

func TestDrops(t *testing.T) {
	t.Parallel()
	host := newHost(t)
	drops := func(family model.Family, chain string) (drops bool) {
		require.NoError(t, host.Do(func() error {
			hook, _, err := FindChain(family, "filter", chain)
			drops = hook.Drops
			return err
		}))
		return drops
	}
	require.False(t, drops(model.IPv4, "FORWARD"), "it does not exist")
	run(t, host, "iptables-nft -P FORWARD DROP", "iptables-nft -P INPUT ACCEPT", "iptables-nft -N CHAIN", "ip6tables-nft -P FORWARD ACCEPT")
	require.True(t, drops(model.IPv4, "FORWARD"))
	require.False(t, drops(model.IPv4, "INPUT"))
	require.False(t, drops(model.IPv4, "CHAIN"))
	require.False(t, drops(model.IPv6, "FORWARD"))
	run(t, host, "iptables-nft -P FORWARD ACCEPT")
	require.False(t, drops(model.IPv4, "FORWARD"))
}

// TestRemoveChains asserts that chains, and the rules that lead to them, are found and removed in a
// table in which others have rules that iptables' programs cannot print, and that the rest stays.
func TestRemoveChains(t *testing.T) {
	host := newHost(t)
	c := dial(t, host)
	own := func(chain string) bool { return strings.HasPrefix(chain, "OWN-") }
	for program, table := range map[string]Table{"iptables-nft": {FamilyOf(model.IPv4), "nat"}, "ip6tables-nft": {FamilyOf(model.IPv6), "nat"}} {
		names, refs, exists, err := c.FindChains(table, own)
		require.NoError(t, err)
		require.False(t, exists)
		require.Empty(t, names)
		require.Empty(t, refs)
		require.NoError(t, c.RemoveChains(table, own))
		run(t, host, program+" -t nat -N OTHER")
		family := strings.TrimSuffix(program, "tables-nft")
		run(t, host, "nft add rule "+family+" nat OTHER tcp dport { 8443, 9443 } meta mark set 0x1")
		before, err := host.Run(t.Context(), "nft", "list", "table", family, "nat")
		require.NoError(t, err)
		var want []string
		for i := range 300 {
			want = append(want, fmt.Sprintf("OWN-%03d", i))
			if i > 0 {
				continue
			}
			run(t, host, program+" -t nat -N OWN-000", program+" -t nat -I OTHER -j OWN-000", program+" -t nat -A OTHER -p tcp -g OWN-000")
		}
		m := &Messages{Table: table}
		for i, name := range want[1:] {
			m.AddChain(name, Hook{})
			m.AddRule(name, Do(Jump(want[i])))
		}
		require.NoError(t, c.CommitParts(m, PartLength))
		names, refs, exists, err = c.FindChains(table, own)
		require.NoError(t, err)
		require.True(t, exists)
		require.Equal(t, want, names)
		require.Len(t, refs, 2)
		for _, r := range refs {
			require.Equal(t, "OTHER", r.Chain)
			require.Equal(t, "OWN-000", r.Target)
		}
		require.NoError(t, c.RemoveChains(table, own))
		after, err := host.Run(t.Context(), "nft", "list", "table", family, "nat")
		require.NoError(t, err)
		require.Equal(t, before, after)
	}
}
