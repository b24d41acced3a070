package nft

import (
	"time"

	"golang.org/x/sys/unix"
)

// Grace waits until every packet that is in the kernel's rules at the time of the call has left
// them.
//
// A packet in a chain of nftables passes the rules that the chain had when the packet entered it. A
// lookup in a set or map, however, finds the content of that moment. So a rule that refuses packets
// which a map does not have must be removed before the map, with a Grace in
// between, and not in the same transaction.
func Grace() {
	const global = 1 // MEMBARRIER_CMD_GLOBAL, which waits for an RCU grace period
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, global, 0, 0); errno != 0 {
		<-time.After(50 * time.Millisecond) // a kernel with nohz_full CPUs lacks this command
	}
}
