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

// setID names a set or map of the table.
type setID uint16

// The sets and maps. An id is a Service port's in idBits; index counts the backends of one of its sets from 0; with
// affinity, a number names a backend of one Service port in both of its sets. What is known of a backend is held under id and
// number, as a number that was given, and that affinity may still hold, can be given again.
//
// The kernel has sets in a list, in the order in which they were made, which is this one, and looks through it by name for each that changes: what
// changes with each endpoint is first.
const (
	// Each is that of the cluster set of backends; with 1 added it is that of the local set. Before them are the maps of endpoints:
	// id . index : address . port, without affinity.
	sizes     setID = parts * backendSets                 // id : class
	numbers         = sizes + backendSets                 // id . index : number, with affinity
	backends        = numbers + backendSets               // id . number : address . port, with affinity
	firstPick       = backends + backendSets              // class : chain; see picks
	otherSets       = firstPick + setID(vias)*backendSets // which there is one of each
)

const (
	hairpins   = otherSets + iota // address . the same address, of backends on this node
	frontends                     // address . protocol . port : id and policy
	nodePorts                     // protocol . port : id and policy
	clusterIPs                    // address
	policies                      // policy : chain
	affinity                      // id . client : number; filled by packets
	sources                       // with a length of prefixes added: address . protocol . port . prefix of sources

	setCount = sources + 129
)

// The backends of one set, of all Service ports, are in parts, each a map, so that a table can be read back in a time that grows no
// more than they do: to give the next 32 KiB of a map the kernel walks it from the beginning. A Service port's are in one part, the
// first with room for them.
const (
	parts    = 16
	partSize = 1 << 15
)

// endpoints gives the map of a part.
func endpoints(set backendSet, part uint8) setID {
	return setID(part)*backendSets + set
}

// part gives the part that a map of endpoints is.
func (s setID) part() (part uint8, ok bool) {
	return uint8(s / backendSets), s < sizes
}

// backendSet is one of a Service port's sets of backends, to be added to the ids above.
type backendSet = setID

const (
	cluster backendSet = iota
	local
	backendSets
)

// picks gives the map of chains that choose a backend of a set.
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

// partSuffix is at the end of names that are those of the first part otherwise.
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

// setOf gives the set of a name, as String gives it.
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

// always are the sets that the table has whether or not anything needs them.
func (s setID) always() bool {
	return s < backendSets || s >= sizes && s < sources && s != affinity
}

// field is a part of a key or of data: nft's number for its type, by which it prints it, and its length in bytes.
type field struct {
	kind   uint32
	length int
}

// Types that nft knows. Integers without a meaning of their own are marks for it: it prints those it calls integers only
// in sets that say by an expression how long they are, and not all versions of it can read that back.
var (
	ipv4Type    = field{7, 4}
	ipv6Type    = field{8, 16}
	protoType   = field{12, 1}
	portType    = field{13, 2}
	integerType = field{19, 4}
)

// definition is what the kernel is told of a set.
type definition struct {
	key, data []field
	// verdicts: the data are chains to go to.
	verdicts bool
	flags    uint32
	size     uint32
}

// maxClients is how many clients' affinity is held at once, of all Services together; more than that have none.
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
	return definition{key: []field{integerType, integerType}, data: backend} // backends, endpoints
}

// typeAndLength gives nft's number for a field or a concatenation, and its length: in that each takes whole registers.
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

// verdictType is the kernel's number for chains as data.
const verdictType = 0xffffff00

// write gives the attributes of the definition that the kernel gives back.
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

// userdata tells nft how to print integers that are no part of a concatenation.
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

// equals tells whether the kernel's attributes of a set are those of the definition.
func (d definition) equals(attrs []byte) bool {
	w := &writer{}
	d.write(w)
	for kind, value := range attributes(w.buf) {
		held := attribute(attrs, kind)
		switch kind {
		case unix.NFTA_SET_FLAGS: // left out if there are none
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

// Keys and data. Integers are as the processor has them, for that is how expressions such as numgen give them; addresses
// and ports are as packets have them.

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

// appendFrontend gives the key of a frontend in frontends, or without an address in nodePorts.
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

// backendOf reads what appendBackend wrote.
func (d *dialect) backendOf(b []byte) netip.AddrPort {
	a, _ := netip.AddrFromSlice(b[:d.address.length])
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(b[d.address.length:]))
}

// maxBackend is how long a backend is at most.
const maxBackend = 20
