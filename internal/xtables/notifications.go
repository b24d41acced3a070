package xtables

import (
	"encoding/binary"
	"math"

	"golang.org/x/net/bpf"
)

// NotificationBuffer is the number of bytes of notifications that a socket holds until they are
// read. Large transactions of others have to fit, such as kube-proxy's or the sets of network
// policies. If a transaction does not fit, everything has to be programmed again.
const NotificationBuffer = 8 << 20

// WithoutOwn returns a filter for a socket that receives notifications from nf_tables. The filter
// drops notifications about what the socket with this netlink port does itself. That saves waking
// up for them. They could also be more than the socket can hold until they are read.
func WithoutOwn(port uint32) ([]bpf.RawInstruction, error) {
	return bpf.Assemble([]bpf.Instruction{
		// The sender's port in nlmsghdr, read as if it were in network byte order.
		bpf.LoadAbsolute{Off: 12, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, port)), SkipTrue: 1},
		bpf.RetConstant{Val: math.MaxUint32},
		bpf.RetConstant{Val: 0},
	})
}
