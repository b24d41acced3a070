// These tests prove that messages that are written are read again, and that reading any bytes ends
// and goes no further than what was received.
package netlink

import (
	"encoding/binary"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// attribute is an attribute to write. Exactly one of the fields after kind counts.
type attribute struct {
	kind   uint16
	nested []attribute
	value  any
}

func drawAttributes(t *rapid.T, depth int) (list []attribute) {
	for range rapid.IntRange(0, 5).Draw(t, "attributes") {
		a := attribute{kind: uint16(rapid.IntRange(0, unix.NLA_F_NET_BYTEORDER-1).Draw(t, "kind"))}
		switch rapid.IntRange(0, 5).Draw(t, "value") {
		case 0:
			a.value = rapid.SliceOfN(rapid.Byte(), 0, 9).Draw(t, "bytes")
		case 1:
			a.value = rapid.String().Draw(t, "text")
		case 2:
			a.value = rapid.Uint16().Draw(t, "number")
		case 3:
			a.value = rapid.Uint32().Draw(t, "number")
		default:
			if depth < 3 {
				a.nested = drawAttributes(t, depth+1)
			}
		}
		list = append(list, a)
	}
	return list
}

func (a attribute) write(w *Writer, big bool) {
	switch value := a.value.(type) {
	case []byte:
		w.Bytes(a.kind, value)
	case string:
		w.Text(a.kind, value)
	case uint16:
		if big {
			w.BigUint16(a.kind, value)
		} else {
			w.Uint16(a.kind, value)
		}
	case uint32:
		if big {
			w.BigUint32(a.kind, value)
		} else {
			w.Uint32(a.kind, value)
		}
	default:
		at := w.Nest(a.kind)
		for _, nested := range a.nested {
			nested.write(w, big)
		}
		w.Close(at)
	}
}

func (a attribute) require(t require.TestingT, content []byte, big bool) {
	switch value := a.value.(type) {
	case []byte:
		require.Equal(t, value, append([]byte{}, content...))
	case string:
		require.Equal(t, value, Text(content))
	case uint16:
		if big {
			require.Equal(t, value, BigUint16(content))
		} else {
			require.Equal(t, value, binary.NativeEndian.Uint16(content))
		}
	case uint32:
		if big {
			require.Equal(t, value, BigUint32(content))
		} else {
			require.Equal(t, value, Uint32(content))
		}
	default:
		requireAttributes(t, a.nested, content, big)
	}
}

func requireAttributes(t require.TestingT, want []attribute, b []byte, big bool) {
	first := map[uint16][]byte{}
	i := 0
	for kind, content := range Attributes(b) {
		require.Less(t, i, len(want))
		require.Equal(t, want[i].kind, kind)
		want[i].require(t, content, big)
		if _, again := first[kind]; !again {
			first[kind] = content
		}
		i++
	}
	require.Len(t, want, i)
	for kind, content := range first {
		require.Equal(t, content, Attribute(b, kind))
	}
}

// TestCodec asserts that what is written is read.
func TestCodec(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type message struct {
			kind, flags uint16
			header      []byte
			attributes  []attribute
		}
		big := rapid.Bool().Draw(t, "network byte order")
		var want []message
		w := &Writer{}
		for range rapid.IntRange(0, 4).Draw(t, "messages") {
			m := message{
				rapid.Uint16().Draw(t, "kind"), rapid.Uint16().Draw(t, "flags"),
				rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "header"), drawAttributes(t, 0),
			}
			at := w.Begin(m.kind, m.flags)
			w.Buf = append(w.Buf, m.header...)
			for _, a := range m.attributes {
				a.write(w, big)
			}
			w.End(at)
			want = append(want, m)
		}
		i := 0
		for m := range Messages(w.Buf) {
			require.Equal(t, want[i].kind, m.Kind)
			require.Equal(t, want[i].flags|unix.NLM_F_REQUEST, m.Flags)
			require.Equal(t, want[i].header, m.Body[:4])
			requireAttributes(t, want[i].attributes, m.Attributes(4), big)
			i++
		}
		require.Len(t, want, i)
	})
}

// TestMalformed asserts that nothing is read beyond what was received, whatever it is, and that
// each read comes to an end.
func TestMalformed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := slices.Clip(rapid.SliceOfN(rapid.Byte(), 0, 100).Draw(t, "received"))
		for i := 0; i+2 <= len(b); i += 4 { // lengths that may fit
			if rapid.Bool().Draw(t, "length") {
				binary.NativeEndian.PutUint16(b[i:], uint16(rapid.IntRange(0, len(b)+1).Draw(t, "of")))
			}
		}
		length := 0
		for m := range Messages(b) {
			length += unix.NLMSG_HDRLEN + len(m.Body)
			inner := 0
			for _, content := range Attributes(m.Attributes(rapid.IntRange(0, 20).Draw(t, "header"))) {
				inner += attributeHeader + len(content)
			}
			require.LessOrEqual(t, inner, len(m.Body))
		}
		require.LessOrEqual(t, length, len(b))
		require.Zero(t, Uint32(b[:min(len(b), 3)]))
		require.Zero(t, BigUint32(b[:min(len(b), 3)]))
		require.Zero(t, BigUint16(b[:min(len(b), 1)]))
	})
}
