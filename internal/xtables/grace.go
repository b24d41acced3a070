package xtables

import (
	"time"

	"golang.org/x/sys/unix"
)

// Grace waits until every packet that was in the kernel's rules when it is called has left them. The rules of nftables that a packet passes in a
// chain are those of when it came to that chain, but what it finds in sets and maps is of the moment when it looks: so what
// refuses packets that a map does not have is to be removed before the map, not with it.
func Grace() {
	const global = 1 // MEMBARRIER_CMD_GLOBAL, which waits for an RCU grace period
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, global, 0, 0); errno != 0 {
		<-time.After(50 * time.Millisecond) // a kernel with nohz_full CPUs does not do it
	}
}
