package nftables

import (
	"encoding/binary"
	"iter"

	"golang.org/x/sys/unix"
)

// writer appends netlink messages and their attributes to a buffer. Nothing in it can fail. This
// package writes only valid values, and splits a list that may become too long for one attribute
// beforehand: see elements.
type writer struct {
	buf []byte
}

const (
	headerLen  = unix.NLMSG_HDRLEN + 4 // length of a message's headers, nlmsghdr and nfgenmsg
	attrLen    = 4                     // length of an attribute's header
	maxAttrLen = 1<<16 - 1 - attrLen   // longest content of an attribute
)

// message begins a message of nf_tables and returns the position to pass to end.
func (w *writer) message(kind int, flags uint16, family byte) int {
	return w.header(unix.NFNL_SUBSYS_NFTABLES<<8|uint16(kind), flags, family, 0)
}

func (w *writer) header(kind, flags uint16, family byte, resource uint16) int {
	at := len(w.buf)
	w.buf = append(w.buf, 0, 0, 0, 0)
	w.buf = binary.NativeEndian.AppendUint16(w.buf, kind)
	w.buf = binary.NativeEndian.AppendUint16(w.buf, flags|unix.NLM_F_REQUEST)
	w.buf = append(w.buf, 0, 0, 0, 0, 0, 0, 0, 0, family, 0)
	w.buf = binary.BigEndian.AppendUint16(w.buf, resource)
	return at
}

// end completes the message that began at a position.
func (w *writer) end(at int) {
	binary.NativeEndian.PutUint32(w.buf[at:], uint32(len(w.buf)-at))
}

// nest begins an attribute that contains attributes, and returns the position to pass to close.
func (w *writer) nest(kind uint16) int {
	at := len(w.buf)
	w.attr(kind|unix.NLA_F_NESTED, 0)
	return at
}

func (w *writer) close(at int) {
	binary.NativeEndian.PutUint16(w.buf[at:], uint16(len(w.buf)-at))
}

func (w *writer) attr(kind uint16, length int) {
	w.buf = binary.NativeEndian.AppendUint16(w.buf, uint16(attrLen+length))
	w.buf = binary.NativeEndian.AppendUint16(w.buf, kind)
}

func (w *writer) bytes(kind uint16, data []byte) {
	w.attr(kind, len(data))
	w.buf = append(w.buf, data...)
	w.pad()
}

// text writes a string with a zero at the end, as the kernel expects it.
func (w *writer) text(kind uint16, s string) {
	w.attr(kind, len(s)+1)
	w.buf = append(w.buf, s...)
	w.buf = append(w.buf, 0)
	w.pad()
}

func (w *writer) uint32(kind uint16, n uint32) {
	w.attr(kind, 4)
	w.buf = binary.BigEndian.AppendUint32(w.buf, n)
}

func (w *writer) pad() {
	for len(w.buf)%4 != 0 {
		w.buf = append(w.buf, 0)
	}
}

// attributes yields the type and content of each attribute in b. Types are without their flags. It
// stops at the first malformed attribute.
func attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= attrLen {
			length := int(binary.NativeEndian.Uint16(b))
			if length < attrLen || length > len(b) {
				return
			}
			if !yield(binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), b[attrLen:length]) {
				return
			}
			b = b[min((length+3)&^3, len(b)):]
		}
	}
}

// attribute returns the content of the first attribute of a type. nil means that there is none.
func attribute(b []byte, kind uint16) []byte {
	for k, v := range attributes(b) {
		if k == kind {
			return v
		}
	}
	return nil
}

// textOf returns a string without the zero at its end.
func textOf(b []byte) string {
	if len(b) > 0 && b[len(b)-1] == 0 {
		b = b[:len(b)-1]
	}
	return string(b)
}

// messages yields each netlink message in b: its header and what follows the header. It stops at
// the first malformed message.
func messages(b []byte) iter.Seq2[header, []byte] {
	return func(yield func(header, []byte) bool) {
		for len(b) >= unix.NLMSG_HDRLEN {
			length := int(binary.NativeEndian.Uint32(b))
			if length < unix.NLMSG_HDRLEN || length > len(b) {
				return
			}
			h := header{binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint16(b[6:]), binary.NativeEndian.Uint32(b[8:]), binary.NativeEndian.Uint32(b[12:])}
			if !yield(h, b[unix.NLMSG_HDRLEN:length]) {
				return
			}
			b = b[min((length+3)&^3, len(b)):]
		}
	}
}

// header is the header of a netlink message without its length.
type header struct {
	kind, flags uint16
	seq, port   uint32
}

// nftables returns the message's nf_tables type and what follows nfgenmsg. ok is false for other
// messages.
func (h header) nftables(body []byte) (kind int, attrs []byte, ok bool) {
	if h.kind>>8 != unix.NFNL_SUBSYS_NFTABLES || len(body) < headerLen-unix.NLMSG_HDRLEN {
		return 0, nil, false
	}
	return int(h.kind & 0xff), body[headerLen-unix.NLMSG_HDRLEN:], true
}

// uint32Of returns an attribute's number in network byte order, or 0 if b does not hold one.
func uint32Of(b []byte) uint32 {
	if len(b) != 4 {
		return 0
	}
	return binary.BigEndian.Uint32(b)
}
