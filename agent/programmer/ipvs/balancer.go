package ipvs

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"io"
	"net/netip"
	"os"
	"runtime"
	"unsafe"

	mobyipvs "github.com/moby/ipvs"
	"github.com/sirupsen/logrus"
	vnetlink "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// balancer is the kernel's IPVS: its virtual services and their backends.
type balancer struct {
	// Handle carries rare requests, one at a time.
	*mobyipvs.Handle
	// commands carries frequent requests, in batches.
	commands *netlink.Socket
	entries  *entryReader
	generic  uint16         // number of IPVS in generic netlink
	requests netlink.Writer // reused by each operation
}

// openBalancer opens the sockets for IPVS. IPVS must be loaded, because the library looks for it
// only once.
func openBalancer() (*balancer, error) {
	family, err := vnetlink.GenlFamilyGet("IPVS")
	if err != nil {
		return nil, err
	}
	b := &balancer{generic: family.ID}
	if b.commands, err = netlink.Open(unix.NETLINK_GENERIC); err != nil {
		return nil, err
	}
	if b.entries, err = newEntryReader(); err != nil {
		b.commands.Close()
		return nil, err
	}
	logrus.SetOutput(io.Discard) // the library calls modprobe, too, and logs if there is none
	if b.Handle, err = mobyipvs.New(""); err != nil {
		b.commands.Close()
		b.entries.close()
		return nil, err
	}
	return b, nil
}

func (b *balancer) close() {
	b.commands.Close()
	b.entries.close()
	b.Close()
}

// try creates a virtual service that receives no packets, with these backends, and removes it.
func (b *balancer) try(family model.Family, scheduler string, backends view.Backends) error {
	k := serviceKey{number: maxID, family: family}
	remove := command{kind: commandDelService, service: k}
	create := command{kind: commandNewService, service: k, virtual: &virtual{serviceKey: k, scheduler: scheduler}}
	commands := []command{remove, create} // a process that was killed meanwhile may have left it
	for backend := range backends.All() {
		commands = append(commands, command{kind: commandNewBackend, service: k, backend: backend.Address, weight: 1})
	}
	commands = append(commands, remove)
	var refused error
	err := b.execute(commands, func(i int, err *netlink.Error) {
		if i > 0 && refused == nil {
			refused = fmt.Errorf("%v: %w", &commands[i], err)
		}
	})
	return cmp.Or(err, refused)
}

// execute lets the kernel carry out commands in their order, whether or not single ones fail. It
// calls failed with the index of each that fails.
func (b *balancer) execute(commands []command, failed func(i int, err *netlink.Error)) error {
	b.requests.Buf = b.requests.Buf[:0]
	for i := range commands {
		commands[i].write(&b.requests, b.generic)
	}
	return b.commands.Execute(&b.requests, failed)
}

// askAbout returns a request for information about a virtual service.
func (b *balancer) askAbout(kind byte, k serviceKey) *netlink.Writer {
	b.requests.Buf = b.requests.Buf[:0]
	(&command{kind: kind, service: k}).write(&b.requests, b.generic)
	return &b.requests
}

// readService reads the settings of a virtual service. It returns unix.ESRCH if
// there is none. The library would read 64 KiB for each answer.
func (b *balancer) readService(k serviceKey) (s settings, err error) {
	err = b.commands.Get(b.askAbout(commandGetService, k), func(m netlink.Message) {
		for kind, value := range netlink.Attributes(netlink.Attribute(m.Attributes(genericHeader), attrService)) {
			switch kind {
			case svcAttrScheduler:
				s.scheduler = netlink.Text(value)
			case svcAttrFlags: // followed by a mask of valid flags
				s.flags = netlink.Uint32(value[:min(4, len(value))])
			case svcAttrTimeout:
				s.timeout = netlink.Uint32(value)
			case svcAttrNetmask:
				s.netmask = netlink.Uint32(value)
			}
		}
	})
	if err != nil {
		return s, fmt.Errorf("read IPVS' virtual service %v: %w", k, err)
	}
	return s, nil
}

// heldBackend is a backend that the kernel holds.
type heldBackend struct {
	address     netip.AddrPort
	weight      uint32
	connections uint32
	active      uint32 // connections that have not ended
	// altered means that others have limited the backend's connections, or made IPVS send it packets
	// without translating them.
	altered bool
}

// serves reports whether the backend gets new connections as this package wants it.
func (b heldBackend) serves() bool { return b.weight == 1 && !b.altered }

// readBackends appends the backends of a virtual service. A virtual service that does not exist has
// none.
func (b *balancer) readBackends(to []heldBackend, k serviceKey) ([]heldBackend, error) {
	var err error
	begin := len(to)
	each := func(held heldBackend) { to = append(to, held) }
	if k.family == model.IPv4 && entriesKnown {
		err = b.entries.read(k, each)
	} else {
		err = b.dumpBackends(k, func() { to = to[:begin] }, each)
	}
	if err != nil {
		return nil, fmt.Errorf("read the backends of IPVS' virtual service %v: %w", k, err)
	}
	return to, nil
}

// dumpBackends calls each with every backend of a virtual service, after reset. It reads them over
// netlink, and may begin anew.
func (b *balancer) dumpBackends(k serviceKey, reset func(), each func(heldBackend)) error {
	return b.commands.Read(b.askAbout(commandGetBackend, k), reset, func(m netlink.Message) {
		held := parseBackend(netlink.Attribute(m.Attributes(genericHeader), attrBackend), k.family)
		if held.address.IsValid() {
			each(held)
		}
	})
}

func parseBackend(b []byte, family model.Family) (held heldBackend) {
	var address []byte
	var port uint16
	for kind, value := range netlink.Attributes(b) {
		switch kind {
		case destAttrAddress: // 16 bytes for either family
			address = value[:min(nft.FamilyOf(family).Address.Length, len(value))]
		case destAttrPort:
			port = netlink.BigUint16(value)
		case destAttrWeight:
			held.weight = netlink.Uint32(value)
		case destAttrMethod, destAttrUpper:
			held.altered = held.altered || netlink.Uint32(value) != 0
		case destAttrActive:
			held.active = netlink.Uint32(value)
		case destAttrInactive:
			held.connections = netlink.Uint32(value)
		}
	}
	if a, ok := netip.AddrFromSlice(address); ok {
		held.address = netip.AddrPortFrom(a, port)
	}
	held.connections += held.active
	return held
}

// entryReader reads the backends of an IPv4 virtual service by getsockopt, as arrays of C structs.
// That takes the kernel a fraction of the time that netlink takes. There is no such option for
// IPv6.
type entryReader struct {
	fd  int
	buf []byte // an ip_vs_get_dests; the address of an entry that was not read is zero
}

// entriesKnown reports whether this machine has the layout below. 32-bit x86 has another one.
const entriesKnown = runtime.GOARCH != "386"

// The layout of ip_vs_get_dests and ip_vs_dest_entry, from include/uapi/linux/ip_vs.h: offsets and
// sizes in bytes.
const (
	getDests = 64 + 1024 + 64 + 4 // IP_VS_SO_GET_DESTS

	destsProtocol, destsAddress, destsPort, destsMark, destsCount, destsSize = 0, 4, 8, 12, 16, 24

	entryAddress, entryPort, entryMethod, entryWeight, entryUpper, entryActive, entryInactive, entrySize = 0, 4, 8, 12, 16, 24, 28, 96
)

func newEntryReader() (*entryReader, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	return &entryReader{fd: fd, buf: make([]byte, destsSize+128*entrySize)}, nil
}

func (e *entryReader) close() { _ = unix.Close(e.fd) }

// read calls each with every backend of an IPv4 virtual service.
func (e *entryReader) read(k serviceKey, each func(heldBackend)) error {
	for {
		if err := e.ask(k); err != nil {
			return err
		}
		// The kernel does not say how many backends there are. If there was room for more, it has
		// returned all of them.
		last := e.buf[len(e.buf)-entrySize:]
		if binary.NativeEndian.Uint32(last[entryAddress:]) == 0 {
			break
		}
		e.buf = make([]byte, destsSize+2*(len(e.buf)-destsSize))
	}
	for b := e.buf[destsSize:]; ; b = b[entrySize:] {
		address := [4]byte(b[entryAddress:])
		if address == [4]byte{} {
			return nil
		}
		clear(b[entryAddress : entryAddress+len(address)])
		active := binary.NativeEndian.Uint32(b[entryActive:])
		each(heldBackend{
			address:     netip.AddrPortFrom(netip.AddrFrom4(address), binary.BigEndian.Uint16(b[entryPort:])),
			weight:      binary.NativeEndian.Uint32(b[entryWeight:]),
			connections: active + binary.NativeEndian.Uint32(b[entryInactive:]),
			active:      active,
			altered: binary.NativeEndian.Uint32(b[entryMethod:])&mobyipvs.ConnectionFlagFwdMask != mobyipvs.ConnectionFlagMasq ||
				binary.NativeEndian.Uint32(b[entryUpper:]) != 0,
		})
	}
}

// ask lets the kernel write its answer into the buffer.
func (e *entryReader) ask(k serviceKey) error {
	head := e.buf[:destsSize]
	clear(head)
	if k.number != 0 {
		binary.NativeEndian.PutUint32(head[destsMark:], markTag|k.number)
	} else {
		binary.NativeEndian.PutUint16(head[destsProtocol:], uint16(nft.ProtocolNumber(k.protocol)))
		copy(head[destsAddress:], k.address.AsSlice())
		binary.BigEndian.PutUint16(head[destsPort:], k.port)
	}
	binary.NativeEndian.PutUint32(head[destsCount:], uint32((len(e.buf)-destsSize)/entrySize))
	length := uint32(len(e.buf))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(e.fd), unix.SOL_IP, getDests,
		uintptr(unsafe.Pointer(&e.buf[0])), uintptr(unsafe.Pointer(&length)), 0)
	if errno != 0 && errno != unix.ESRCH { // ESRCH means that the virtual service does not exist
		return os.NewSyscallError("getsockopt", errno)
	}
	return nil
}
