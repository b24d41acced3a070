// These tests prove that a socket carries out many requests in order and names those that fail,
// with a real kernel. They also prove that a dump is repeated until no object can be missing;
// there, the test answers as the kernel does.
package netlink

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/testenv"
)

// open opens a socket on a host.
func open(t *testing.T, host *testenv.Host, protocol int) (s *Socket) {
	t.Helper()
	require.NoError(t, host.Do(func() (err error) {
		s, err = Open(protocol)
		return err
	}))
	t.Cleanup(s.Close)
	return s
}

// address writes a message about an address of the first device, which is lo.
func address(w *Writer, kind, flags uint16, a netip.Addr) {
	at := w.Begin(kind, flags)
	w.Buf = append(w.Buf, unix.AF_INET, 32, 0, unix.RT_SCOPE_HOST, 0, 0, 0, 0)
	binary.NativeEndian.PutUint32(w.Buf[len(w.Buf)-4:], 1)
	w.Bytes(unix.IFA_LOCAL, a.AsSlice())
	w.End(at)
}

// addresses returns the node's IPv4 addresses, each with the number of times that it is listed.
func addresses(t *testing.T, s *Socket) map[netip.Addr]int {
	t.Helper()
	list, err := s.Addresses(unix.AF_INET)
	require.NoError(t, err)
	found := map[netip.Addr]int{}
	for _, a := range list {
		found[a.Addr()]++
	}
	return found
}

// TestExecute asserts that many messages are carried out in their order, and that those which fail
// are named with the kernel's explanation.
func TestExecute(t *testing.T) {
	t.Parallel()
	s := open(t, testenv.NewNetwork(t).AddNode("a").Host, unix.NETLINK_ROUTE)
	before := addresses(t, s)
	const count = 3*maxSent + 1
	numbered := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}) }
	w := &Writer{}
	for i := range count {
		address(w, unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL, numbered(i))
	}
	require.NoError(t, s.Execute(w, func(i int, err *Error) { require.NoError(t, err, i) }))
	held := addresses(t, s)
	require.Len(t, held, len(before)+count)
	require.Equal(t, 1, held[numbered(count-1)])

	w.Buf = w.Buf[:0]
	for i := range count {
		if i%7 == 0 { // exists
			address(w, unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL, numbered(i))
		} else {
			address(w, unix.RTM_DELADDR, 0, numbered(i))
		}
	}
	var failed []int
	require.NoError(t, s.Execute(w, func(i int, err *Error) {
		require.ErrorIs(t, err, unix.EEXIST)
		failed = append(failed, i)
	}))
	require.Len(t, failed, (count+6)/7)
	for n, i := range failed {
		require.Equal(t, 7*n, i)
	}
	require.Len(t, addresses(t, s), len(before)+len(failed))

	w.Buf = w.Buf[:0]
	address(w, unix.RTM_DELADDR, 0, netip.MustParseAddr("192.0.2.1"))
	require.NoError(t, s.Execute(w, func(_ int, err *Error) {
		require.ErrorIs(t, err, unix.EADDRNOTAVAIL)
		require.EqualError(t, err, "cannot assign requested address: ipv4: Address not found")
	}))
}

// TestLostAnswers asserts that failures are reported up to the first answer that does not fit in
// the socket's buffer, and that the socket works for the next request.
func TestLostAnswers(t *testing.T) {
	t.Parallel()
	s := open(t, testenv.NewNetwork(t).AddNode("a").Host, unix.NETLINK_ROUTE)
	require.NoError(t, unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 1))
	w := &Writer{}
	for range 1000 {
		address(w, unix.RTM_DELADDR, 0, netip.MustParseAddr("192.0.2.1"))
	}
	var failed []int
	require.ErrorIs(t, s.Transact(w.Buf, len(w.Buf), func(i int, err *Error) {
		require.ErrorIs(t, err, unix.EADDRNOTAVAIL)
		failed = append(failed, i)
	}), ErrUnanswered)
	require.NotEmpty(t, failed)
	require.Less(t, len(failed), 1000)
	for n, i := range failed {
		require.Equal(t, n, i)
	}
	w.Buf = w.Buf[:0]
	address(w, unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL, netip.MustParseAddr("192.0.2.1"))
	require.NoError(t, s.Execute(w, func(_ int, err *Error) { require.NoError(t, err) }))
}

// kernel is the other end of a Socket in a test. What it has to answer is written beforehand.
type kernel struct {
	t  *testing.T
	fd int
}

func newKernel(t *testing.T) (*Socket, kernel) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Close(pair[1])) })
	s := &Socket{fd: pair[0], in: make([]byte, 1<<16)}
	t.Cleanup(s.Close)
	return s, kernel{t, pair[1]}
}

// answer sends the answer to the request with a number: as many objects as given, of which the last
// one has the flags, and the end with an error number.
func (k kernel) answer(seq uint32, objects int, flags uint16, errno unix.Errno) {
	w := &Writer{}
	message := func(kind, flags uint16, content int32) {
		at := w.Begin(kind, flags)
		binary.NativeEndian.PutUint32(w.Buf[at+8:], seq)
		w.Buf = binary.NativeEndian.AppendUint32(w.Buf, uint32(content))
		w.End(at)
	}
	for i := range objects {
		if i < objects-1 {
			message(unix.NLMSG_MIN_TYPE, 0, int32(i))
		} else {
			message(unix.NLMSG_MIN_TYPE, flags, int32(i))
		}
	}
	message(unix.NLMSG_DONE, 0, -int32(errno))
	require.NoError(k.t, unix.Send(k.fd, w.Buf, 0))
}

// TestRead asserts that a dump is repeated until no object can be missing.
func TestRead(t *testing.T) {
	t.Parallel()
	const interrupted = unix.NLM_F_DUMP_INTR
	type dump struct {
		objects int
		flags   uint16
		errno   unix.Errno
	}
	for name, test := range map[string]struct {
		dumps []dump
		read  int
		err   error
	}{
		"at once":                     {[]dump{{3, 0, 0}}, 3, nil},
		"empty":                       {[]dump{{0, 0, 0}}, 0, nil},
		"the second time":             {[]dump{{3, interrupted, 0}, {4, 0, 0}}, 4, nil},
		"when two attempts agree":     {[]dump{{3, interrupted, 0}, {5, interrupted, 0}, {4, interrupted, 0}, {4, interrupted, 0}}, 4, nil},
		"not if the kernel refuses":   {[]dump{{1, 0, unix.EPERM}}, 1, unix.EPERM},
		"not if it refuses later":     {[]dump{{2, interrupted, 0}, {0, 0, unix.ENOENT}}, 0, unix.ENOENT},
		"not if an answer is missing": {nil, 0, ErrUnanswered},
		"not if it goes on forever":   {[]dump{9: {}}, 10, ErrInterrupted},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, kernel := newKernel(t)
			if test.err == ErrInterrupted { //nolint:errorlint // the table's
				for i := range test.dumps {
					test.dumps[i] = dump{i + 1, interrupted, 0}
				}
			}
			kernel.answer(0, 7, interrupted, unix.EIO) // to an earlier request
			for i, d := range test.dumps {
				kernel.answer(uint32(i+1), d.objects, d.flags, d.errno)
			}
			w := &Writer{}
			w.End(w.Begin(unix.NLMSG_MIN_TYPE, 0))
			read := 0
			err := s.Read(w, func() { read = 0 }, func(Message) { read++ })
			require.ErrorIs(t, err, test.err)
			require.Equal(t, test.read, read)
			require.Equal(t, max(1, len(test.dumps)), int(s.seq))
		})
	}
}

// TestError asserts what an error says.
func TestError(t *testing.T) {
	t.Parallel()
	for want, err := range map[string]*Error{
		"no such file or directory":                           {Errno: unix.ENOENT},
		"remove chain a: no such file or directory":           {Errno: unix.ENOENT, Operation: "remove chain a"},
		"add chain a: invalid argument: Chain type not found": {Errno: unix.EINVAL, Operation: "add chain a", Explanation: "Chain type not found"},
	} {
		require.EqualError(t, err, want)
		require.EqualError(t, fmt.Errorf("x: %w", err), "x: "+want)
		require.ErrorIs(t, err, err.Errno)
	}
}
