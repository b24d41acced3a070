package ipvs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/model"
)

// statusDNAT is IPS_DST_NAT of linux/netfilter/nf_conntrack_common.h. It marks a connection whose
// destination nat translates.
const statusDNAT = 1 << 5

// ledFrontends are the frontends from which IPVS leads connections, as keys of the tables' maps.
// They include both addresses and NodePorts.
type ledFrontends map[model.Family]map[string]bool

func (l ledFrontends) add(family model.Family, key string) {
	if l[family] == nil {
		l[family] = map[string]bool{}
	}
	l[family][key] = true
}

func (l ledFrontends) addTable(family model.Family, held elements) {
	for k := range held {
		if k.set == others.frontends() || k.set == others.nodePorts() {
			l.add(family, k.key)
		}
	}
}

// addService adds the frontend of a virtual service by address.
func (l ledFrontends) addService(k serviceKey) {
	l.add(k.family, addressKey(k.address)+portKey(k.protocol, k.port))
}

// forget makes conntrack forget the connections that IPVS led from these frontends, once it no
// longer does. Otherwise the packets that clients still send would go nowhere, because nat looks
// only at new connections. After forget, nat treats them as new. UDP goes on with another backend.
// A backend resets an unknown TCP connection, so that clients connect again at once instead of
// waiting.
func (l ledFrontends) forget() error {
	for family, keys := range l {
		var gone [][]byte
		err := conntrack(family, nl.IPCTNL_MSG_CT_GET, unix.NLM_F_DUMP, nil, func(entry []byte) {
			if led(entry, keys) {
				gone = append(gone, bytes.Clone(entry))
			}
		})
		if err != nil {
			return fmt.Errorf("read the connection tracking table: %w", err)
		}
		for _, entry := range gone {
			err := conntrack(family, nl.IPCTNL_MSG_CT_DELETE, unix.NLM_F_ACK, entry, func([]byte) {})
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("remove a connection from the connection tracking table: %w", err)
			}
		}
	}
	return nil
}

// conntrack sends a request about the connections of a family, and calls each with the attributes
// of every connection in the answer.
func conntrack(family model.Family, operation, flags int, attributes []byte, each func(attributes []byte)) error {
	r := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|operation, flags)
	number := uint8(unix.AF_INET)
	if family == model.IPv6 {
		number = unix.AF_INET6
	}
	r.AddData(&nl.Nfgenmsg{NfgenFamily: number, Version: nl.NFNETLINK_V0})
	r.AddRawData(attributes)
	return r.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(message []byte) bool {
		if len(message) >= nl.SizeofNfgenmsg {
			each(message[nl.SizeofNfgenmsg:])
		}
		return true
	})
}

// led reports whether IPVS leads a connection from one of the frontends. IPVS does if the replies
// come from an address or port to which the client does not send, and nat does not translate the
// connection.
func led(entry []byte, frontends map[string]bool) bool {
	var original, reply tuple
	status := uint32(0)
	for kind, value := range attributes(entry) {
		switch kind {
		case nl.CTA_TUPLE_ORIG:
			original = parseTuple(value)
		case nl.CTA_TUPLE_REPLY:
			reply = parseTuple(value)
		case nl.CTA_STATUS:
			if len(value) == 4 {
				status = binary.BigEndian.Uint32(value)
			}
		}
	}
	// Encoded as by portKey.
	port := string([]byte{original.protocol, 0, 0, 0}) + original.destinationPort + "\x00\x00"
	return status&statusDNAT == 0 &&
		(original.destination != reply.source || original.destinationPort != reply.sourcePort) &&
		(frontends[original.destination+port] || frontends[port])
}

// tuple is one direction of a connection, with addresses and ports in network byte order.
type tuple struct {
	source, destination         string
	sourcePort, destinationPort string
	protocol                    byte
}

func parseTuple(b []byte) (t tuple) {
	for part, value := range attributes(b) {
		isIP := part == nl.CTA_TUPLE_IP
		for kind, value := range attributes(value) {
			switch {
			case isIP && (kind == nl.CTA_IP_V4_SRC || kind == nl.CTA_IP_V6_SRC):
				t.source = string(value)
			case isIP && (kind == nl.CTA_IP_V4_DST || kind == nl.CTA_IP_V6_DST):
				t.destination = string(value)
			case isIP:
			case kind == nl.CTA_PROTO_NUM && len(value) == 1:
				t.protocol = value[0]
			case kind == nl.CTA_PROTO_SRC_PORT:
				t.sourcePort = string(value)
			case kind == nl.CTA_PROTO_DST_PORT:
				t.destinationPort = string(value)
			}
		}
	}
	return t
}
