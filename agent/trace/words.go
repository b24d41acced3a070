package trace

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/internal/model"
)

// The words for what expressions of nf_tables load. Values that are compared with it are shown in
// the usual form of what was loaded.
const (
	sourceAddress      = "source address"
	destinationAddress = "destination address"
	destinationPort    = "destination port"
	sourcePortWord     = "source port"
	protocolWord       = "protocol"
	familyWord         = "family"
	inputInterface     = "input interface"
	// outputInterface is known only as to whether it is lo; see compileRule.
	outputInterface = "output interface"
	markWord        = "mark"
	maskedMark      = "masked mark"
	ctMarkWord      = "ct mark"
	ctStateWord     = "ct state"
	ctStatusWord    = "ct status"
	sourceType      = "type of the source"
	destinationType = "type of the destination"
)

// askedWords are those that ask for no more than a packet's protocol and destination.
var askedWords = []string{destinationAddress, destinationPort, protocolWord, familyWord, destinationType}

// words are the words of a rule of nf_tables while it is compiled.
type words struct {
	all []string
	// loaded is what registers hold, by their offsets.
	loaded map[int]string
	// constants are the constants that registers hold, each with its word's index in all.
	constants map[int]constant
	// mask are the bits of a masked mark. wrote means that the rule has set the mark, so that it no
	// longer asks for what other rules have set.
	mask  uint32
	wrote bool
	// asksMore is as in Rule.
	asksMore bool
}

type constant struct {
	value []byte
	at    int
}

// constant records that the next word is a constant in a register.
func (w *words) constant(register int, value []byte) {
	w.constants[register] = constant{value, len(w.all)}
}

// use returns a constant that a register holds, as a value of what is named, and removes the word
// for it. It returns an empty string if the register holds no constant.
func (w *words) use(register, length int, of string) string {
	c, ok := w.constants[register]
	if !ok || len(c.value) < length {
		return ""
	}
	w.all[c.at] = ""
	return valueText(of, c.value[:length])
}

// note notes what a step loads. It returns the bits of the mark that the step asks.
func (w *words) note(s step, text string) (asksMark uint32) {
	switch s := s.(type) {
	case load:
		w.loaded[s.to] = text
		if c, ok := w.constants[s.to]; ok && c.at != len(w.all) {
			delete(w.constants, s.to) // it was overwritten
		}
	case masked:
		if w.loaded[s.to] = w.loaded[s.from]; w.loaded[s.from] == markWord && len(s.mask) == 4 {
			w.loaded[s.to], w.mask = maskedMark, binary.NativeEndian.Uint32(s.mask)
		}
	case setMark:
		w.wrote = w.wrote || !s.connection
	case compare:
		return w.asked(s.from, len(s.data))
	case within:
		return w.asked(s.at, len(s.from))
	case random:
		delete(w.loaded, s.to)
	case find:
		asksMark = w.asked(s.key, s.length)
		if s.isMap {
			delete(w.loaded, s.to)
		}
	}
	return asksMark
}

// asked notes what a comparison with registers asks. It returns the bits of the mark.
func (w *words) asked(register, length int) (mark uint32) {
	for at := register; at < register+length; at += 4 {
		text, ok := w.loaded[at]
		isMark := text == markWord || text == maskedMark
		if !ok || isMark && w.wrote {
			continue
		}
		w.asksMore = w.asksMore || !slices.Contains(askedWords, text)
		switch text {
		case markWord:
			mark = ^uint32(0)
		case maskedMark:
			mark |= w.mask
		}
	}
	return mark
}

// String returns the words.
func (w *words) String() string {
	return strings.Join(slices.DeleteFunc(slices.Clone(w.all), func(s string) bool { return s == "" }), " ")
}

// last returns the last word.
func (w *words) last() string {
	if len(w.all) == 0 {
		return ""
	}
	return w.all[len(w.all)-1]
}

var (
	protocolNames = map[byte]string{
		unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp", unix.IPPROTO_SCTP: "sctp", unix.IPPROTO_ICMP: "icmp", unix.IPPROTO_ICMPV6: "ipv6-icmp",
	}
	stateNames = map[uint32]string{
		nft.CtStateInvalid: "invalid", ctStateEstablished: "established", 1 << 2: "related", nft.CtStateNew: "new", ctStateUntracked: "untracked",
	}
	typeNames = map[uint32]string{
		unix.RTN_UNICAST: "unicast", unix.RTN_LOCAL: "local", unix.RTN_BROADCAST: "broadcast", unix.RTN_MULTICAST: "multicast",
	}
)

// valueText returns a value of what is named in its usual form.
func valueText(of string, b []byte) string {
	switch of {
	case sourceAddress, destinationAddress:
		return addressText(b)
	case destinationPort, sourcePortWord:
		if len(b) >= 2 {
			return fmt.Sprint(binary.BigEndian.Uint16(b))
		}
	case protocolWord:
		if len(b) > 0 {
			if name, ok := protocolNames[b[0]]; ok {
				return name
			}
			return fmt.Sprint(b[0])
		}
	case familyWord:
		if len(b) > 0 {
			return map[byte]string{unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6"}[b[0]]
		}
	case inputInterface, outputInterface:
		name, _, whole := strings.Cut(string(b), "\x00")
		if !whole {
			name += "*"
		}
		return fmt.Sprintf("%q", name)
	}
	if len(b) != 4 {
		if len(b) <= 2 {
			return fmt.Sprint(bigEndian(b))
		}
		return fmt.Sprintf("0x%x", b)
	}
	n := binary.NativeEndian.Uint32(b)
	switch of {
	case ctStateWord:
		return bitNames(n, stateNames)
	case ctStatusWord:
		return bitNames(n, map[uint32]string{nft.CtStatusDNAT: "dnat"})
	case sourceType, destinationType:
		if name, ok := typeNames[n]; ok {
			return name
		}
		return fmt.Sprint(n)
	}
	return fmt.Sprintf("0x%x", n)
}

func bigEndian(b []byte) (n uint64) {
	for _, one := range b {
		n = n<<8 | uint64(one)
	}
	return n
}

// addressText returns an address, or a network if the bytes are only the first ones of an address.
func addressText(b []byte) string {
	whole := b
	switch {
	case len(b) < 4:
		whole = append(slices.Clone(b), make([]byte, 4-len(b))...)
	case len(b) > 4 && len(b) < 16:
		whole = append(slices.Clone(b), make([]byte, 16-len(b))...)
	}
	a, ok := netip.AddrFromSlice(whole)
	switch {
	case !ok:
		return fmt.Sprintf("0x%x", b)
	case len(whole) > len(b):
		return netip.PrefixFrom(a, 8*len(b)).String()
	}
	return a.String()
}

// bitNames returns the names of bits, or the number if one has no name.
func bitNames(n uint32, names map[uint32]string) string {
	var all []string
	for bit := range 32 {
		if n&(1<<bit) == 0 {
			continue
		}
		name, ok := names[1<<bit]
		if !ok {
			return fmt.Sprint(n)
		}
		all = append(all, name)
	}
	if len(all) == 0 {
		return "0"
	}
	return strings.Join(all, ",")
}

// payloadText returns the words for a part of a packet's headers.
func payloadText(family model.Family, isTransport bool, offset, length uint32) string {
	source, destination, protocol, size := uint32(12), uint32(16), uint32(9), uint32(4)
	if family == model.IPv6 {
		source, destination, protocol, size = 8, 24, 6, 16
	}
	switch {
	case isTransport && offset == 2 && length == 2:
		return destinationPort
	case isTransport && offset == 0 && length == 2:
		return sourcePortWord
	case isTransport:
		return fmt.Sprintf("transport header @%d,%d", offset, length)
	case offset == source && length <= size:
		return sourceAddress
	case offset == destination && length <= size:
		return destinationAddress
	case offset == protocol && length == 1:
		return protocolWord
	}
	return fmt.Sprintf("network header @%d,%d", offset, length)
}
