package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/nft"
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
	// id . number : address . port, with affinity.
	backends  = numbers + backendSets
	firstPick = backends + backendSets              // class : chain, see picks
	firstDraw = firstPick + setID(vias)*backendSets // size : chain, with affinity, see draws
	timeouts  = firstDraw + setID(vias)*backendSets // timeout : chain, see refTimeout
	otherSets = timeouts + setID(vias)              // from here on there is one of each
)

const (
	hairpins   = otherSets + iota // address . the same address, of backends on this node
	frontends                     // address . protocol . port : id and policy
	nodePorts                     // protocol . port : id and policy
	clusterIPs                    // address
	policies                      // policy : chain
	affinity                      // id . client : number; filled by packets
	// sources plus a prefix length: address . protocol . port . prefix of a source.
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

// draws returns the map that leads to the chains which draw a backend of a set for affinity.
func draws(set backendSet, v via) setID { return firstDraw + setID(v)*backendSets + set }

// leads reports whether the set's elements lead to chains that are parts of the table.
func (s setID) leads() bool { return s == policies || s >= firstPick && s < otherSets }

var setNames = nameSets()

func nameSets() map[setID]string {
	names := map[setID]string{
		frontends: "frontends", nodePorts: "nodeports",
		clusterIPs: "cluster-ips", hairpins: "hairpins", policies: "policies", affinity: "affinity",
		sizes + cluster: "cluster-sizes", numbers + cluster: "cluster-numbers", backends + cluster: "cluster-backends",
		sizes + local: "local-sizes", numbers + local: "local-numbers", backends + local: "local-backends",
		picks(cluster, viaAddress): "cluster-picks", picks(cluster, viaNodePort): "cluster-nodeport-picks",
		picks(local, viaAddress): "local-picks", picks(local, viaNodePort): "local-nodeport-picks",
		draws(cluster, viaAddress): "cluster-draws", draws(cluster, viaNodePort): "cluster-nodeport-draws",
		draws(local, viaAddress): "local-draws", draws(local, viaNodePort): "local-nodeport-draws",
		timeouts + setID(viaAddress): "timeouts", timeouts + setID(viaNodePort): "nodeport-timeouts",
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

func (d *dialect) setOf(name string) (s setID, ok bool) {
	if length, found := strings.CutPrefix(name, sourcesPrefix); found {
		bits, err := strconv.Atoi(length)
		s = sources + setID(bits)
		return s, err == nil && bits >= 0 && bits <= d.Bits() && s.String() == name
	}
	for s, n := range setNames {
		if n == name {
			return s, true
		}
	}
	return 0, false
}

// ranks is the number of ranks.
const ranks = 5

// rank returns the position of a set in the order in which elements can be added one after the
// other: whatever an element leads to, or a packet needs once it has found the element, has a lower
// rank. A cluster IP comes last, because it refuses the ports that frontends do not have.
func (s setID) rank() int {
	switch {
	case s == clusterIPs:
		return 4
	case s == frontends, s == nodePorts:
		return 3
	case s == sizes+cluster, s == sizes+local:
		return 2
	case s < backends: // endpoints and numbers
		return 1
	}
	return 0
}

// always reports whether the table has the set even if nothing needs it.
func (s setID) always() bool {
	return s < backendSets || s >= sizes && s < sources && s != affinity
}

// maxClients is the number of clients, of all Services together, whose affinity the table can hold.
// Further clients have no affinity.
const maxClients = 1 << 19

func (d *dialect) define(s setID) nft.Definition {
	frontend := []nft.Field{d.Address, nft.ProtoType, nft.PortType}
	backend := []nft.Field{d.Address, nft.PortType}
	number := []nft.Field{nft.IntegerType}
	switch s {
	case frontends:
		return nft.Definition{Key: frontend, Data: number}
	case nodePorts:
		return nft.Definition{Key: frontend[1:], Data: number}
	case clusterIPs:
		return nft.Definition{Key: frontend[:1]}
	case hairpins:
		return nft.Definition{Key: []nft.Field{d.Address, d.Address}}
	case affinity:
		return nft.Definition{
			Key: []nft.Field{nft.IntegerType, d.Address}, Data: number,
			Flags: unix.NFT_SET_EVAL | unix.NFT_SET_TIMEOUT, Size: maxClients,
		}
	case sizes + cluster, sizes + local:
		return nft.Definition{Key: number, Data: number}
	case numbers + cluster, numbers + local:
		return nft.Definition{Key: []nft.Field{nft.IntegerType, nft.IntegerType}, Data: number}
	}
	if s.leads() {
		return nft.Definition{Key: number, Verdicts: true}
	}
	if s >= sources {
		return nft.Definition{Key: append(frontend, d.Address)}
	}
	// All other sets are maps of backends or endpoints.
	return nft.Definition{Key: []nft.Field{nft.IntegerType, nft.IntegerType}, Data: backend}
}

func (d *dialect) addSet(m *nft.Messages, s setID) { m.AddSet(s.String(), d.define(s)) }

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
	return appendPort(append(b, nft.ProtocolNumber(p), 0, 0, 0), f.Port)
}

// backendOf decodes what appendBackend wrote.
func (d *dialect) backendOf(b []byte) netip.AddrPort {
	a, _ := netip.AddrFromSlice(b[:d.Address.Length])
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(b[d.Address.Length:]))
}

// maxBackend is the longest encoding of a backend in bytes.
const maxBackend = 20
