package ipvs

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/model"
)

// heldBackend is a backend that the kernel holds.
type heldBackend struct {
	address     netip.AddrPort
	weight      uint32
	connections uint32
}

// readBackends appends the backends of a virtual service. A virtual service that does not exist has
// none.
func (m *machine) readBackends(to []heldBackend, k serviceKey) ([]heldBackend, error) {
	err := m.tellBackends(k, func(b heldBackend) { to = append(to, b) })
	if err != nil {
		return nil, fmt.Errorf("read the backends of IPVS' virtual service %v: %w", k, err)
	}
	return to, nil
}

// tellBackends calls each with every backend of a virtual service.
func (m *machine) tellBackends(k serviceKey, each func(heldBackend)) error {
	if k.family == model.IPv4 && entriesKnown {
		return m.entries.read(k, each)
	}
	return m.dumpBackends(k, each)
}

// dumpBackends is tellBackends over netlink.
func (m *machine) dumpBackends(k serviceKey, each func(heldBackend)) error {
	return m.commands.dump(m.askAbout(commandGetBackend, k), func(body []byte) {
		if len(body) < 4 {
			return
		}
		for kind, nested := range attributes(body[4:]) {
			if b := parseBackend(nested, k.family); kind == attrBackend && b.address.IsValid() {
				each(b)
			}
		}
	})
}

// askAbout returns a request for information about a virtual service.
func (m *machine) askAbout(command byte, k serviceKey) *requests {
	r := &m.requests
	r.reset()
	r.begin(m.ipvsFamily, 0)
	r.buf = append(r.buf, command, genericVersion, 0, 0)
	k.write(r, nil)
	r.end()
	return r
}

func parseBackend(b []byte, family model.Family) (held heldBackend) {
	var address []byte
	var port uint16
	for kind, value := range attributes(b) {
		switch {
		case kind == destAttrAddress:
			address = value
		case kind == destAttrPort && len(value) >= 2:
			port = uint16(value[0])<<8 | uint16(value[1])
		case kind == destAttrWeight && len(value) >= 4:
			held.weight = hostNumber(value)
		case (kind == destAttrActive || kind == destAttrInactive) && len(value) >= 4:
			held.connections += hostNumber(value)
		}
	}
	// The kernel returns 16 bytes for either family.
	length := 4
	if family == model.IPv6 {
		length = 16
	}
	if a, ok := netip.AddrFromSlice(address[:min(length, len(address))]); ok {
		held.address = netip.AddrPortFrom(a, port)
	}
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

	entryAddress, entryPort, entryWeight, entryActive, entryInactive, entrySize = 0, 4, 12, 24, 28, 96
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
		each(heldBackend{
			address:     netip.AddrPortFrom(netip.AddrFrom4(address), binary.BigEndian.Uint16(b[entryPort:])),
			weight:      binary.NativeEndian.Uint32(b[entryWeight:]),
			connections: binary.NativeEndian.Uint32(b[entryActive:]) + binary.NativeEndian.Uint32(b[entryInactive:]),
		})
	}
}

// ask lets the kernel write its answer into the buffer.
func (e *entryReader) ask(k serviceKey) error {
	head := e.buf[:destsSize]
	clear(head)
	if s := k.moby(); s.FWMark != 0 {
		binary.NativeEndian.PutUint32(head[destsMark:], s.FWMark)
	} else {
		binary.NativeEndian.PutUint16(head[destsProtocol:], s.Protocol)
		copy(head[destsAddress:], s.Address)
		binary.BigEndian.PutUint16(head[destsPort:], s.Port)
	}
	binary.NativeEndian.PutUint32(head[destsCount:], uint32((len(e.buf)-destsSize)/entrySize))
	length := uint32(len(e.buf))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(e.fd), unix.SOL_IP, getDests, uintptr(unsafe.Pointer(&e.buf[0])), uintptr(unsafe.Pointer(&length)), 0)
	if errno != 0 && errno != unix.ESRCH { // ESRCH means that the virtual service does not exist
		return os.NewSyscallError("getsockopt", errno)
	}
	return nil
}
