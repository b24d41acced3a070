// Command guest is the first process of the virtual machine that package vm boots, and its
// modprobe. As the first process it mounts the host's file system with a writable layer in memory
// above it, runs the programs that the host asks for, and turns the machine off. It is built for
// each boot, and without cgo so that it needs no libraries.
package main

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

func main() {
	if os.Getpid() != 1 {
		if err := modprobe(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, "modprobe:", err)
			os.Exit(1)
		}
		return
	}
	if err := boot(); err != nil {
		// Standard output is the console, which the host shows if a result is missing.
		fmt.Println("guest:", err)
	}
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART); err != nil {
		fmt.Println("guest: turn the machine off:", err)
	}
}
