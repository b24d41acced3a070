package verifytest

import (
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// Golden programs pairs of random clusters on a node, one after the other and Service by Service,
// and writes to the output of the test how much each step changes in nf_tables, and what the
// commands print after it. internal/tools/goldens.sh compares this with what another commit does.
// Golden asserts that another process leaves the same in the kernel by the same steps.
func Golden[P programmer.Programmer](t *testing.T, open func() (P, error), pairs int, commands ...string) {
	t.Helper()
	n := testenv.NewNetwork(t).AddNode("a")
	m := newMonitor(t, n)
	for seed := range pairs {
		var o view.Options
		var from, to []model.Keyed
		rapid.Custom(func(r *rapid.T) bool {
			o, from, to = options(r), objects(r, n.IPv4, n.IPv6), objects(r, n.IPv4, n.IPv6)
			return true
		}).Example(seed)
		var before []string
		for _, out := range []io.Writer{t.Output(), io.Discard} {
			var p P
			require.NoError(t, n.Do(func() (err error) {
				p, err = open()
				return err
			}))
			var held []string
			step := func(name string, program func() error) {
				require.NoError(t, n.Do(program))
				fmt.Fprintf(out, "==== seed %d: %s; numbers of nf_tables messages by type: %v\n", seed, name, m.changes())
				for _, command := range commands {
					text, err := n.Run(t.Context(), "sh", "-c", command)
					require.NoError(t, err)
					text = elements.ReplaceAllStringFunc(text, sorted)
					held = append(held, text)
					fmt.Fprintf(out, "---- %s\n%s", command, text)
				}
			}
			v := view.New(o)
			for i, all := range [][]model.Keyed{from, to} {
				if node, ok := all[0].(*model.Node); ok && i == 0 {
					v.SetNode(node)
					v.Update()
					step("Replace", func() error { return p.Replace(t.Context(), v.State()) })
				}
				for _, name := range []string{"a", "b", "c", "d"} {
					var service *model.Service
					var of []*model.Slice
					for _, object := range all {
						if s, ok := object.(*model.Service); ok && s.Name == name {
							service = s
						} else if s, ok := object.(*model.Slice); ok && s.Service == name {
							of = append(of, s)
						}
					}
					v.Set(model.ServiceKey{Namespace: namespace, Name: name}, service, of)
					changes, node := v.Update()
					require.False(t, node)
					step(fmt.Sprint(name, i), func() error { return p.Apply(t.Context(), changes) })
				}
			}
			step("Cleanup", func() error { return p.Cleanup(t.Context()) })
			if before == nil {
				before = held
			}
			for i := range held {
				require.Equal(t, before[i], held[i], "seed %d", seed)
			}
		}
	}
}

// elements matches the elements of a set, which nft may list in any order.
var elements = regexp.MustCompile(`(?s)elements = \{ .*? \}\n`)

func sorted(elements string) string {
	all := strings.Split(strings.TrimSuffix(strings.TrimPrefix(elements, "elements = { "), " }\n"), ",\n")
	for i := range all {
		all[i] = strings.TrimSpace(all[i])
	}
	slices.Sort(all)
	return "elements:\n" + strings.Join(all, "\n") + "\n"
}

// monitor counts the changes of nf_tables on a node.
type monitor struct {
	*testing.T
	socket int
}

func newMonitor(t *testing.T, n *testenv.Node) monitor {
	t.Helper()
	m := monitor{T: t}
	require.NoError(t, n.Do(func() error {
		s, err := nl.Subscribe(unix.NETLINK_NETFILTER, unix.NFNLGRP_NFTABLES)
		if err == nil {
			t.Cleanup(s.Close)
			m.socket = s.GetFd()
		}
		return err
	}))
	require.NoError(t, unix.SetsockoptInt(m.socket, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20))
	return m
}

// changes returns how many messages of each type the kernel has sent since the last call.
func (m monitor) changes() map[uint16]int {
	counts, buffer := map[uint16]int{}, make([]byte, 1<<20)
	for {
		n, _, err := unix.Recvfrom(m.socket, buffer, unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			return counts
		}
		require.NoError(m, err)
		messages, err := syscall.ParseNetlinkMessage(buffer[:n])
		require.NoError(m, err)
		for _, message := range messages {
			counts[message.Header.Type&0xff]++
		}
	}
}
