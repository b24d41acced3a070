package netlink

import (
	"encoding/binary"
	"iter"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/model"
)

// Writer appends messages and their attributes to Buf. Nothing in it can fail. The caller writes
// only valid values, and no attribute whose content is longer than MaxAttribute.
//
// The kernel pads attributes to four bytes, and so does Writer. A message therefore ends where the
// next one begins.
type Writer struct {
	Buf []byte
}

const (
	attributeHeader = unix.SizeofNlAttr
	alignment       = unix.NLMSG_ALIGNTO // also of attributes

	// MaxAttribute is the length in bytes of the longest content of an attribute.
	MaxAttribute = 1<<16 - 1 - attributeHeader
)

// Begin begins a message of a type, which is a request, and returns the position to pass to End.
// What is appended until then belongs to the message, at first the fixed header of the protocol.
func (w *Writer) Begin(kind, flags uint16) (at int) {
	at = len(w.Buf)
	w.Buf = append(w.Buf, 0, 0, 0, 0)
	w.Buf = binary.NativeEndian.AppendUint16(w.Buf, kind)
	w.Buf = binary.NativeEndian.AppendUint16(w.Buf, flags|unix.NLM_F_REQUEST)
	w.Buf = append(w.Buf, 0, 0, 0, 0, 0, 0, 0, 0)
	return at
}

// End completes the message that began at a position.
func (w *Writer) End(at int) {
	binary.NativeEndian.PutUint32(w.Buf[at:], uint32(len(w.Buf)-at))
}

// Nest begins an attribute that contains attributes, and returns the position to pass to Close.
func (w *Writer) Nest(kind uint16) (at int) {
	at = len(w.Buf)
	w.header(kind|unix.NLA_F_NESTED, 0)
	return at
}

// Close completes the attribute that Nest began at a position.
func (w *Writer) Close(at int) {
	binary.NativeEndian.PutUint16(w.Buf[at:], uint16(len(w.Buf)-at))
}

func (w *Writer) header(kind uint16, length int) {
	w.Buf = binary.NativeEndian.AppendUint16(w.Buf, uint16(attributeHeader+length))
	w.Buf = binary.NativeEndian.AppendUint16(w.Buf, kind)
}

func (w *Writer) pad() {
	for len(w.Buf)%alignment != 0 {
		w.Buf = append(w.Buf, 0)
	}
}

// Bytes writes an attribute with this content.
func (w *Writer) Bytes(kind uint16, content []byte) {
	w.header(kind, len(content))
	w.Buf = append(w.Buf, content...)
	w.pad()
}

// Text writes an attribute with a string and a zero at its end, as the kernel expects it.
func (w *Writer) Text(kind uint16, s string) {
	w.header(kind, len(s)+1)
	w.Buf = append(w.Buf, s...)
	w.Buf = append(w.Buf, 0)
	w.pad()
}

// Uint16 writes an attribute with a number in the processor's byte order.
func (w *Writer) Uint16(kind, n uint16) {
	w.header(kind, 2)
	w.Buf = binary.NativeEndian.AppendUint16(w.Buf, n)
	w.pad()
}

// Uint32 writes an attribute with a number in the processor's byte order.
func (w *Writer) Uint32(kind uint16, n uint32) {
	w.header(kind, 4)
	w.Buf = binary.NativeEndian.AppendUint32(w.Buf, n)
}

// BigUint16 writes an attribute with a number in network byte order.
func (w *Writer) BigUint16(kind, n uint16) {
	w.header(kind, 2)
	w.Buf = binary.BigEndian.AppendUint16(w.Buf, n)
	w.pad()
}

// BigUint32 writes an attribute with a number in network byte order.
func (w *Writer) BigUint32(kind uint16, n uint32) {
	w.header(kind, 4)
	w.Buf = binary.BigEndian.AppendUint32(w.Buf, n)
}

// Attributes yields the type and content of each attribute in b. Types are without their flags. It
// stops at the first malformed attribute.
func Attributes(b []byte) iter.Seq2[uint16, []byte] {
	const flags = unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= attributeHeader {
			length := int(binary.NativeEndian.Uint16(b))
			if length < attributeHeader || length > len(b) {
				return
			}
			if !yield(binary.NativeEndian.Uint16(b[2:])&^flags, b[attributeHeader:length]) {
				return
			}
			b = b[min(aligned(length), len(b)):]
		}
	}
}

func aligned(length int) int { return (length + alignment - 1) &^ (alignment - 1) }

// Attribute returns the content of the first attribute of a type in b. nil means that there is
// none.
func Attribute(b []byte, kind uint16) []byte {
	for k, content := range Attributes(b) {
		if k == kind {
			return content
		}
	}
	return nil
}

// Text returns a string without the zero at its end.
func Text(b []byte) string {
	if len(b) > 0 && b[len(b)-1] == 0 {
		b = b[:len(b)-1]
	}
	return string(b)
}

// Uint32 returns a number in the processor's byte order, or 0 if b does not hold one.
func Uint32(b []byte) uint32 {
	if len(b) != 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(b)
}

// BigUint16 returns a number in network byte order, or 0 if b does not hold one.
func BigUint16(b []byte) uint16 {
	if len(b) != 2 {
		return 0
	}
	return binary.BigEndian.Uint16(b)
}

// BigUint32 returns a number in network byte order, or 0 if b does not hold one.
func BigUint32(b []byte) uint32 {
	if len(b) != 4 {
		return 0
	}
	return binary.BigEndian.Uint32(b)
}

// Domain returns the kernel's number of an IP family.
func Domain(family model.Family) byte {
	if family == model.IPv6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// Message is a message from the kernel. It is valid only during the call that it is passed to.
type Message struct {
	// Kind is the message's type.
	Kind, Flags uint16
	// Seq is the number of the request that the message answers. Port is the address of the socket
	// that sent the request.
	Seq, Port uint32
	// Body is what follows netlink's header.
	Body []byte
}

// Attributes returns the encoded attributes that follow the protocol's fixed header in the body. A
// body that is shorter than the header has none.
func (m Message) Attributes(header int) []byte { return m.Body[min(header, len(m.Body)):] }

// Messages yields each message in b. It stops at the first malformed one.
func Messages(b []byte) iter.Seq[Message] {
	return func(yield func(Message) bool) {
		for len(b) >= unix.NLMSG_HDRLEN {
			length := int(binary.NativeEndian.Uint32(b))
			if length < unix.NLMSG_HDRLEN || length > len(b) {
				return
			}
			m := Message{
				Kind: binary.NativeEndian.Uint16(b[4:]), Flags: binary.NativeEndian.Uint16(b[6:]),
				Seq: binary.NativeEndian.Uint32(b[8:]), Port: binary.NativeEndian.Uint32(b[12:]), Body: b[unix.NLMSG_HDRLEN:length],
			}
			if !yield(m) {
				return
			}
			b = b[min(aligned(length), len(b)):]
		}
	}
}
