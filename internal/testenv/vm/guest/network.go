package main

import (
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"github.com/vishvananda/netlink"

	"github.com/slicecast/slicecast/internal/testenv/vm/spec"
)

func setUp(name string, addresses ...string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find interface %s: %w", name, err)
	}
	for _, text := range addresses {
		a, err := netlink.ParseAddr(text)
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(link, a); err != nil {
			return fmt.Errorf("%s: add address %s: %w", name, text, err)
		}
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("set interface %s up: %w", name, err)
	}
	return nil
}

// openHost makes ports of the host available as unix sockets for as long as the machine runs.
func openHost(ports []uint16) error {
	if err := setUp("eth0", spec.GuestAddress); err != nil {
		return err
	}
	for _, port := range ports {
		listener, err := net.Listen("unix", spec.Socket(port))
		if err != nil {
			return err
		}
		go serve(listener, fmt.Sprintf("%s:%d", spec.HostAddress, port))
	}
	return nil
}

func serve(listener net.Listener, address string) {
	for {
		near, err := listener.Accept()
		if err != nil {
			fmt.Fprintln(os.Stderr, "guest:", err)
			return
		}
		go func() {
			defer near.Close()
			far, err := net.Dial("tcp", address)
			if err != nil {
				fmt.Fprintln(os.Stderr, "guest:", err)
				return
			}
			defer far.Close()
			var both sync.WaitGroup
			for _, way := range [][2]net.Conn{{near, far}, {far, near}} {
				both.Go(func() {
					// the ends of the connection handle errors
					_, _ = io.Copy(way[1], way[0])
					_ = way[1].(interface{ CloseWrite() error }).CloseWrite() // here, too
				})
			}
			both.Wait()
		}()
	}
}
