// This file encodes and decodes the crafted packets of a wire.
package conformance

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"net/netip"

	"golang.org/x/sys/unix"
)

// packet is a packet that a wire sends or sees: the first packet of a connection, an answer to
// one, or an ICMP error about one. All three carry the same token, which no translation of
// addresses and ports changes.
type packet struct {
	kind     packetKind
	proto    Proto
	src, dst netip.AddrPort
	token    uint32
	// icmp describes the ICMP error; empty for other kinds.
	icmp string
}

type packetKind byte

const (
	opening   packetKind = 'o'
	answer    packetKind = 'a'
	icmpError packetKind = 'e'
)

// portUnreachable is the description of the ICMP error for a port on which no server listens.
const portUnreachable = "ICMP port unreachable"

// The lengths of IP headers without options, in bytes.
const (
	ipv4HeaderLen = 20
	ipv6HeaderLen = 40
)

// encode returns an opening or an answer as an IP packet. The kernel fills in the IPv4 checksum.
func (p packet) encode() []byte {
	var segment []byte
	switch p.proto {
	case TCP:
		segment = make([]byte, 20)
		if p.kind == opening {
			binary.BigEndian.PutUint32(segment[4:], p.token)
			segment[13] = 0x02 // SYN
		} else {
			binary.BigEndian.PutUint32(segment[8:], p.token+1)
			segment[13] = 0x14 // RST, ACK
		}
		segment[12] = 5 << 4 // header length in words
		binary.BigEndian.PutUint16(segment[14:], 64240)
	case UDP:
		segment = make([]byte, 8+5)
		binary.BigEndian.PutUint16(segment[4:], uint16(len(segment)))
		binary.BigEndian.PutUint32(segment[8:], p.token)
		segment[12] = byte(p.kind)
	case SCTP:
		if p.kind == opening { // INIT
			segment = make([]byte, 12+20)
			segment[12], segment[15] = 1, 20
			binary.BigEndian.PutUint32(segment[16:], p.token)
			binary.BigEndian.PutUint32(segment[20:], 65536)
			binary.BigEndian.PutUint16(segment[24:], 1)
			binary.BigEndian.PutUint16(segment[26:], 1)
		} else { // ABORT
			segment = make([]byte, 12+4)
			binary.BigEndian.PutUint32(segment[4:], p.token)
			segment[12], segment[15] = 6, 4
		}
	}
	binary.BigEndian.PutUint16(segment[0:], p.src.Port())
	binary.BigEndian.PutUint16(segment[2:], p.dst.Port())
	switch p.proto {
	case TCP:
		binary.BigEndian.PutUint16(segment[16:], p.checksum(segment))
	case UDP:
		binary.BigEndian.PutUint16(segment[6:], p.checksum(segment))
	case SCTP:
		binary.LittleEndian.PutUint32(segment[8:], crc32.Checksum(segment, crc32.MakeTable(crc32.Castagnoli)))
	}
	return append(p.header(len(segment)), segment...)
}

// header returns the IP header for a segment of the given length in bytes.
func (p packet) header(length int) []byte {
	src, dst := p.src.Addr().AsSlice(), p.dst.Addr().AsSlice()
	var header []byte
	if p.src.Addr().Is4() {
		header = make([]byte, ipv4HeaderLen-8, 128)
		header[0] = 4<<4 | ipv4HeaderLen/4
		binary.BigEndian.PutUint16(header[2:], uint16(ipv4HeaderLen+length))
		header[8], header[9] = 64, protocolNumbers[p.proto]
	} else {
		header = make([]byte, ipv6HeaderLen-32, 128)
		header[0] = 6 << 4
		binary.BigEndian.PutUint16(header[4:], uint16(length))
		header[6], header[7] = protocolNumbers[p.proto], 64
	}
	return append(append(header, src...), dst...)
}

// checksum returns the TCP or UDP checksum of a segment whose checksum field is zero.
func (p packet) checksum(segment []byte) uint16 {
	pseudo := append(p.src.Addr().AsSlice(), p.dst.Addr().AsSlice()...)
	pseudo = append(pseudo, 0, protocolNumbers[p.proto])
	pseudo = binary.BigEndian.AppendUint16(pseudo, uint16(len(segment)))
	sum := uint32(0)
	for _, bytes := range [][]byte{pseudo, segment} {
		for i, b := range bytes {
			if i%2 == 0 {
				sum += uint32(b) << 8
			} else {
				sum += uint32(b)
			}
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	if sum == 0xffff {
		return 0xffff // 0 would mean that there is no checksum
	}
	return ^uint16(sum)
}

// decodeIP decodes a packet, which may be truncated. It returns false if no wire has sent or
// caused the packet.
func decodeIP(data []byte) (packet, bool) {
	switch {
	case len(data) >= ipv4HeaderLen && data[0]>>4 == 4:
		length := int(data[0]&0xf) * 4
		if length < ipv4HeaderLen || len(data) < length {
			return packet{}, false
		}
		src, dst := netip.AddrFrom4([4]byte(data[12:16])), netip.AddrFrom4([4]byte(data[16:20]))
		return decodeSegment(data[9], src, dst, data[length:])
	case len(data) >= ipv6HeaderLen && data[0]>>4 == 6:
		src, dst := netip.AddrFrom16([16]byte(data[8:24])), netip.AddrFrom16([16]byte(data[24:40]))
		return decodeSegment(data[6], src, dst, data[ipv6HeaderLen:])
	}
	return packet{}, false
}

// decodeSegment decodes what follows an IP header. ICMP errors quote only part of a segment: the
// first eight bytes of a TCP segment, and the first 13 of a datagram, are enough.
func decodeSegment(protocol byte, src, dst netip.Addr, segment []byte) (packet, bool) {
	if len(segment) < 8 {
		return packet{}, false
	}
	if protocol == unix.IPPROTO_ICMP || protocol == unix.IPPROTO_ICMPV6 {
		return decodeICMP(protocol, segment)
	}
	p := packet{
		src: netip.AddrPortFrom(src, binary.BigEndian.Uint16(segment[0:])),
		dst: netip.AddrPortFrom(dst, binary.BigEndian.Uint16(segment[2:])),
	}
	switch protocol {
	case unix.IPPROTO_TCP:
		p.proto, p.kind, p.token = TCP, opening, binary.BigEndian.Uint32(segment[4:])
		if len(segment) < 14 { // quoted in an ICMP error
			return p, true
		}
		if segment[13]&0x04 != 0 { // RST
			p.kind, p.token = answer, binary.BigEndian.Uint32(segment[8:])-1
			return p, true
		}
		return p, segment[13]&0x12 == 0x02 // SYN, not ACK
	case unix.IPPROTO_UDP:
		if len(segment) < 13 {
			return packet{}, false
		}
		p.proto, p.kind, p.token = UDP, packetKind(segment[12]), binary.BigEndian.Uint32(segment[8:])
		return p, p.kind == opening || p.kind == answer
	case unix.IPPROTO_SCTP:
		switch {
		case len(segment) >= 20 && segment[12] == 1: // INIT
			p.proto, p.kind, p.token = SCTP, opening, binary.BigEndian.Uint32(segment[16:])
		case len(segment) >= 16 && segment[12] == 6: // ABORT
			p.proto, p.kind, p.token = SCTP, answer, binary.BigEndian.Uint32(segment[4:])
		default:
			return packet{}, false
		}
		return p, true
	}
	return packet{}, false
}

// decodeICMP decodes an ICMP error, which quotes the packet that caused it.
func decodeICMP(protocol byte, message []byte) (packet, bool) {
	kind, code := message[0], message[1]
	unreachable, port := byte(3), byte(3)
	if protocol == unix.IPPROTO_ICMPV6 {
		unreachable, port = 1, 4
	}
	if kind != unreachable {
		return packet{}, false
	}
	p, ok := decodeIP(message[8:])
	if !ok || p.kind != opening {
		return packet{}, false
	}
	p.kind, p.icmp = icmpError, portUnreachable
	if code != port {
		p.icmp = fmt.Sprintf("ICMP destination unreachable, code %d", code)
	}
	return p, true
}
