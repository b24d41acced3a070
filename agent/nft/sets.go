package nft

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
)

// Field is a component of a key or of data. Kind is nft's number for its type, which says how nft
// prints it. Length is in bytes.
type Field struct {
	Kind   uint32
	Length int
}

// Types that nft knows. nft prints values of its type integer only in sets that carry an expression
// with their length, and not every version can read that back. So integers here have nft's type for
// marks. They are in the processor's byte order.
var (
	IPv4Type    = Field{7, 4}
	IPv6Type    = Field{8, 16}
	ProtoType   = Field{12, 1}
	PortType    = Field{13, 2}
	IntegerType = Field{19, 4}
)

// Definition is the definition of a set or map.
type Definition struct {
	// Key and Data are the fields of keys and data. A set has no data.
	Key, Data []Field
	// Verdicts means that the data are chains to go to.
	Verdicts bool
	// Flags are NFT_SET_*, without NFT_SET_MAP.
	Flags uint32
	// Size is how many elements the set can hold; 0 means any number.
	Size uint32
}

// typeAndLength returns nft's number for a field or a concatenation of fields, and its length in
// bytes. In a concatenation, each field occupies whole registers.
func typeAndLength(fields []Field) (kind, length uint32) {
	if len(fields) == 1 {
		return fields[0].Kind, uint32(fields[0].Length)
	}
	for _, f := range fields {
		kind = kind<<6 | f.Kind
		length += uint32(f.Length+3) &^ 3
	}
	return kind, length
}

const (
	// verdictType is the kernel's type number for chains as data.
	verdictType = 0xffffff00
	// setConcat is NFT_SET_CONCAT. descConcat is NFTA_SET_DESC_CONCAT, and fieldLength is
	// NFTA_SET_FIELD_LEN.
	setConcat   = 1 << 7
	descConcat  = 2
	fieldLength = 1
)

// write writes the attributes of the definition that the kernel also returns.
func (d Definition) write(w *netlink.Writer) {
	w.BigUint32(unix.NFTA_SET_FLAGS, d.flags())
	kind, length := typeAndLength(d.Key)
	w.BigUint32(unix.NFTA_SET_KEY_TYPE, kind)
	w.BigUint32(unix.NFTA_SET_KEY_LEN, length)
	switch {
	case d.Verdicts:
		w.BigUint32(unix.NFTA_SET_DATA_TYPE, verdictType)
	case d.Data != nil:
		kind, length = typeAndLength(d.Data)
		w.BigUint32(unix.NFTA_SET_DATA_TYPE, kind)
		w.BigUint32(unix.NFTA_SET_DATA_LEN, length)
	}
	if userdata := d.userdata(); userdata != nil {
		w.Bytes(unix.NFTA_SET_USERDATA, userdata)
	}
	concat := d.flags()&setConcat != 0
	if d.Size == 0 && !concat {
		return
	}
	at := w.Nest(unix.NFTA_SET_DESC)
	if d.Size > 0 {
		w.BigUint32(unix.NFTA_SET_DESC_SIZE, d.Size)
	}
	if concat {
		fields := w.Nest(descConcat)
		for _, f := range d.Key {
			field := w.Nest(unix.NFTA_LIST_ELEM)
			w.BigUint32(fieldLength, uint32(f.Length))
			w.Close(field)
		}
		w.Close(fields)
	}
	w.Close(at)
}

func (d Definition) flags() uint32 {
	flags := d.Flags
	if d.Verdicts || d.Data != nil {
		flags |= unix.NFT_SET_MAP
	}
	if flags&unix.NFT_SET_INTERVAL != 0 && len(d.Key) > 1 {
		flags |= setConcat
	}
	return flags
}

// userdata returns user data that say how nft prints integers outside of concatenations.
func (d Definition) userdata() []byte {
	const keyByteorder, dataByteorder, hostByteorder = 0, 1, 1
	var b []byte
	for kind, fields := range [][]Field{keyByteorder: d.Key, dataByteorder: d.Data} {
		if len(fields) == 1 && fields[0] == IntegerType {
			b = binary.NativeEndian.AppendUint32(append(b, byte(kind), 4), hostByteorder)
		}
	}
	return b
}

// Is reports whether a set that the kernel holds has this definition.
func (d Definition) Is(held HeldSet) bool {
	w := &netlink.Writer{}
	d.write(w)
	for kind, value := range netlink.Attributes(w.Buf) {
		has := netlink.Attribute(held, kind)
		switch kind {
		case unix.NFTA_SET_FLAGS: // the kernel leaves it out if no flag is set
			if netlink.BigUint32(has) != netlink.BigUint32(value) {
				return false
			}
			continue
		case unix.NFTA_SET_DESC:
			value, has = netlink.Attribute(value, unix.NFTA_SET_DESC_SIZE), netlink.Attribute(has, unix.NFTA_SET_DESC_SIZE)
		}
		if string(has) != string(value) {
			return false
		}
	}
	return true
}

// HasForm reports whether the key and the data of an element have the definition's lengths.
func (d Definition) HasForm(e Element) bool {
	_, keyLen := typeAndLength(d.Key)
	_, dataLen := typeAndLength(d.Data)
	return uint32(len(e.Key)) == keyLen && uint32(len(e.Data)) == dataLen
}
