package xtables

import (
	"encoding/binary"
	"math"

	"golang.org/x/net/bpf"
)

// NotificationBuffer is how many bytes of notifications a socket is to hold until they are read. Others' large transactions, such as
// kube-proxy's or those of a network policy's sets, have to fit: after what does not, everything has to be programmed anew.
const NotificationBuffer = 8 << 20

// WithoutOwn gives a filter for a socket that nf_tables notifies: what the socket with this netlink port does itself does not come in. That
// spares waking up for it, and may be more than can wait to be read.
func WithoutOwn(port uint32) ([]bpf.RawInstruction, error) {
	return bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: 12, Size: 4}, // the sender's port in nlmsghdr, as if it were in network byte order
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, port)), SkipTrue: 1},
		bpf.RetConstant{Val: math.MaxUint32},
		bpf.RetConstant{Val: 0},
	})
}
