package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// setID identifies a set or map of the table.
type setID uint16

// The sets and maps. An id identifies a Service port, in the bits of idBits. An index counts the
// backends of one of its sets from 0. With affinity, a number identifies a backend of one Service
// port in both of its sets. Backends are found by id and number together, because a number may be
// assigned again while affinity still holds it.
//
// The kernel keeps sets in a list, in the order of their creation, and searches it by name for each
// set that changes. So the sets are in this order, which begins with those that change with each
// endpoint.
const (
	// Each constant is the map for the cluster set of backends. The map for the local set follows it.
	// The maps of endpoints come before them: id . index : address . port, without affinity.
	sizes   setID = parts * backendSets // id : class
	numbers       = sizes + backendSets // id . index : number, with affinity
	// id . number : address . port, with affinity
	backends  = numbers + backendSets
	firstPick = backends + backendSets              // class : chain, see picks
	otherSets = firstPick + setID(vias)*backendSets // from here on there is one of each
)

const (
	hairpins   = otherSets + iota // address . the same address, of backends on this node
	frontends                     // address . protocol . port : id and policy
	nodePorts                     // protocol . port : id and policy
	clusterIPs                    // address
	policies                      // policy : chain
	affinity                      // id . client : number; filled by packets
	// sources plus a prefix length: address . protocol . port . prefix of a source
	sources

	setCount = sources + 129
)

// The backends of all Service ports are divided into parts, each of which is a map for each set.
// For each 32 KiB of a map that the kernel lists, it walks the map from the beginning. With maps of
// limited size, the time to read the table grows only linearly. All backends of a Service port are
// in one part, the first that has room for them.
const (
	parts    = 16
	partSize = 1 << 15
)

// endpoints returns the map of endpoints of a part.
func endpoints(set backendSet, part uint8) setID {
	return setID(part)*backendSets + set
}

// part returns the part that a map of endpoints belongs to. ok is false for other sets.
func (s setID) part() (part uint8, ok bool) {
	return uint8(s / backendSets), s < sizes
}

// backendSet is one of a Service port's sets of backends. It is added to the ids above.
type backendSet = setID

const (
	cluster backendSet = iota
	local
	backendSets
)

// picks returns the map that leads to the chains which choose a backend of a set.
func picks(set backendSet, v via) setID { return firstPick + setID(v)*backendSets + set }

var setNames = nameSets()

func nameSets() map[setID]string {
	names := map[setID]string{
		frontends: "frontends", nodePorts: "nodeports",
		clusterIPs: "cluster-ips", hairpins: "hairpins", policies: "policies", affinity: "affinity",
		sizes + cluster: "cluster-sizes", numbers + cluster: "cluster-numbers", backends + cluster: "cluster-backends",
		sizes + local: "local-sizes", numbers + local: "local-numbers", backends + local: "local-backends",
		firstPick: "cluster-picks", firstPick + 1: "local-picks", firstPick + 2: "cluster-nodeport-picks", firstPick + 3: "local-nodeport-picks",
	}
	for part := range uint8(parts) {
		for set, name := range setChains {
			names[endpoints(backendSet(set), part)] = name + "-endpoints" + partSuffix(part)
		}
	}
	return names
}

// partSuffix returns the end of names that belong to a part. It is empty for the first part.
func partSuffix(part uint8) string {
	if part == 0 {
		return ""
	}
	return fmt.Sprintf("-part-%d", part+1)
}

const sourcesPrefix = "sources-"

func (s setID) String() string {
	if s >= sources {
		return sourcesPrefix + strconv.Itoa(int(s-sources))
	}
	return setNames[s]
}

// setOf returns the set whose String is name.
func (d *dialect) setOf(name string) (s setID, ok bool) {
	if length, found := strings.CutPrefix(name, sourcesPrefix); found {
		bits, err := strconv.Atoi(length)
		s = sources + setID(bits)
		return s, err == nil && bits >= 0 && bits <= d.bits && s.String() == name
	}
	for s, n := range setNames {
		if n == name {
			return s, true
		}
	}
	return 0, false
}

// always reports whether the table has the set even if nothing needs it.
func (s setID) always() bool {
	return s < backendSets || s >= sizes && s < sources && s != affinity
}

// field is a component of a key or of data. kind is nft's number for its type, which says how nft
// prints it. length is in bytes.
type field struct {
	kind   uint32
	length int
}

// Types that nft knows. nft prints values of its type integer only in sets that carry an expression
// with their length, and not every version can read that back. So integers here have nft's type for
// marks.
var (
	ipv4Type    = field{7, 4}
	ipv6Type    = field{8, 16}
	protoType   = field{12, 1}
	portType    = field{13, 2}
	integerType = field{19, 4}
)

// definition is the definition of a set as the kernel receives it.
type definition struct {
	key, data []field
	// verdicts means that the data are chains to go to.
	verdicts bool
	flags    uint32
	size     uint32
}

// maxClients is the number of clients, of all Services together, whose affinity the table can hold.
// Further clients have no affinity.
const maxClients = 1 << 19

func (d *dialect) define(s setID) definition {
	frontend := []field{d.address, protoType, portType}
	backend := []field{d.address, portType}
	number := []field{integerType}
	switch s {
	case frontends:
		return definition{key: frontend, data: number}
	case nodePorts:
		return definition{key: frontend[1:], data: number}
	case clusterIPs:
		return definition{key: frontend[:1]}
	case hairpins:
		return definition{key: []field{d.address, d.address}}
	case policies:
		return definition{key: number, verdicts: true}
	case affinity:
		return definition{key: []field{integerType, d.address}, data: number, flags: unix.NFT_SET_EVAL | unix.NFT_SET_TIMEOUT, size: maxClients}
	case sizes + cluster, sizes + local:
		return definition{key: number, data: number}
	case numbers + cluster, numbers + local:
		return definition{key: []field{integerType, integerType}, data: number}
	case firstPick, firstPick + 1, firstPick + 2, firstPick + 3:
		return definition{key: number, verdicts: true}
	}
	if s >= sources {
		return definition{key: append(frontend, d.address)}
	}
	// All other sets are maps of backends or endpoints.
	return definition{key: []field{integerType, integerType}, data: backend}
}

// typeAndLength returns nft's number for a field or a concatenation of fields, and its length in
// bytes. In a concatenation, each field occupies whole registers.
func typeAndLength(fields []field) (kind, length uint32) {
	if len(fields) == 1 {
		return fields[0].kind, uint32(fields[0].length)
	}
	for _, f := range fields {
		kind = kind<<6 | f.kind
		length += uint32(f.length+3) &^ 3
	}
	return kind, length
}

// verdictType is the kernel's type number for chains as data.
const verdictType = 0xffffff00

// write writes the attributes of the definition that the kernel also returns.
func (d definition) write(w *writer) {
	w.uint32(unix.NFTA_SET_FLAGS, d.setFlags())
	kind, length := typeAndLength(d.key)
	w.uint32(unix.NFTA_SET_KEY_TYPE, kind)
	w.uint32(unix.NFTA_SET_KEY_LEN, length)
	switch {
	case d.verdicts:
		w.uint32(unix.NFTA_SET_DATA_TYPE, verdictType)
	case d.data != nil:
		kind, length = typeAndLength(d.data)
		w.uint32(unix.NFTA_SET_DATA_TYPE, kind)
		w.uint32(unix.NFTA_SET_DATA_LEN, length)
	}
	if userdata := d.userdata(); userdata != nil {
		w.bytes(unix.NFTA_SET_USERDATA, userdata)
	}
	if d.size > 0 {
		at := w.nest(unix.NFTA_SET_DESC)
		w.uint32(unix.NFTA_SET_DESC_SIZE, d.size)
		w.close(at)
	}
}

func (d definition) setFlags() uint32 {
	if d.verdicts || d.data != nil {
		return d.flags | unix.NFT_SET_MAP
	}
	return d.flags
}

// userdata returns user data that say how nft prints integers outside of concatenations.
func (d definition) userdata() []byte {
	const keyByteorder, dataByteorder, hostByteorder = 0, 1, 1
	var b []byte
	for kind, fields := range [][]field{keyByteorder: d.key, dataByteorder: d.data} {
		if len(fields) == 1 && fields[0] == integerType {
			b = appendInteger(append(b, byte(kind), 4), hostByteorder)
		}
	}
	return b
}

// equals reports whether the attributes that the kernel returned for a set match the definition.
func (d definition) equals(attrs []byte) bool {
	w := &writer{}
	d.write(w)
	for kind, value := range attributes(w.buf) {
		held := attribute(attrs, kind)
		switch kind {
		case unix.NFTA_SET_FLAGS: // the kernel leaves it out if no flag is set
			if uint32Of(held) != uint32Of(value) {
				return false
			}
			continue
		case unix.NFTA_SET_DESC:
			value, held = attribute(value, unix.NFTA_SET_DESC_SIZE), attribute(held, unix.NFTA_SET_DESC_SIZE)
		}
		if string(held) != string(value) {
			return false
		}
	}
	return true
}

// Keys and data. Integers are in the processor's byte order, as expressions such as numgen produce
// them. Addresses and ports are in network byte order, as in packets.

func appendInteger(b []byte, n uint32) []byte { return binary.NativeEndian.AppendUint32(b, n) }

func appendAddress(b []byte, a netip.Addr) []byte {
	if a.Is4() {
		a4 := a.As4()
		return append(b, a4[:]...)
	}
	a16 := a.As16()
	return append(b, a16[:]...)
}

func appendPort(b []byte, port uint16) []byte { return append(b, byte(port>>8), byte(port), 0, 0) }

func appendBackend(b []byte, a netip.AddrPort) []byte {
	return appendPort(appendAddress(b, a.Addr()), a.Port())
}

// appendFrontend appends the key of a frontend in frontends, or in nodePorts, whose keys have no
// address.
func appendFrontend(b []byte, f view.Frontend, p model.Protocol) []byte {
	if f.Kind != view.NodePort {
		b = appendAddress(b, f.Address)
	}
	return appendPort(append(b, protocolNumber(p), 0, 0, 0), f.Port)
}

func protocolNumber(p model.Protocol) byte {
	switch p {
	case model.TCP:
		return unix.IPPROTO_TCP
	case model.UDP:
		return unix.IPPROTO_UDP
	case model.SCTP:
		return unix.IPPROTO_SCTP
	}
	panic(fmt.Sprintf("protocol %d", p))
}

// backendOf decodes what appendBackend wrote.
func (d *dialect) backendOf(b []byte) netip.AddrPort {
	a, _ := netip.AddrFromSlice(b[:d.address.length])
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(b[d.address.length:]))
}

// maxBackend is the longest encoding of a backend in bytes.
const maxBackend = 20
