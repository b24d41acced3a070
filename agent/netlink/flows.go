package netlink

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/model"
)

// Flow is an entry of the connection tracking table. It is valid only during the call that it is
// passed to. What the kernel did not say is zero.
type Flow struct {
	// Original is the direction of the first packet, and Reply that of the answers. If the destination
	// of one is not the source of the other, the flow is translated.
	Original, Reply Tuple
	// Status has the bits IPS_* of linux/netfilter/nf_conntrack_common.h.
	Status uint32
	// Attributes are the entry as the kernel sent it. They contain the entry's id, so they name this
	// entry and no later one of the same client.
	Attributes []byte
}

// Tuple is one direction of a Flow.
type Tuple struct {
	Source, Destination netip.AddrPort
	Protocol            byte
}

// These constants of linux/netfilter/nfnetlink_conntrack.h are missing from the library.
const (
	ctaFilter          = 25
	ctaFilterOrigFlags = 1
	filterProtocol     = 1 << 3 // CTA_FILTER_F_CTA_PROTO_NUM in nf_internals.h
)

// Flows calls each with every flow of an IP family that has a protocol. 0 means all protocols. A
// kernel before Linux 5.8 also returns flows of other protocols. Flows returns ErrInterrupted if a
// flow may be missing. The library's own function holds the whole table in memory.
func (s *Socket) Flows(family model.Family, protocol byte, each func(Flow)) error {
	err := s.Dump(flowRequest(family, nl.IPCTNL_MSG_CT_GET, func(w *Writer) {
		if protocol == 0 {
			return
		}
		tuple := w.Nest(nl.CTA_TUPLE_ORIG)
		inner := w.Nest(nl.CTA_TUPLE_PROTO)
		w.Bytes(nl.CTA_PROTO_NUM, []byte{protocol})
		w.Close(inner)
		w.Close(tuple)
		filter := w.Nest(ctaFilter)
		w.Uint32(ctaFilterOrigFlags, filterProtocol)
		w.Close(filter)
	}), func(m Message) { each(flowOf(m.Attributes(nl.SizeofNfgenmsg))) })
	if err != nil {
		return fmt.Errorf("read the connection tracking table: %w", err)
	}
	return nil
}

// RemoveFlow removes the flow with these attributes. It is no error if the flow no longer exists.
func (s *Socket) RemoveFlow(family model.Family, attributes []byte) error {
	err := s.Get(flowRequest(family, nl.IPCTNL_MSG_CT_DELETE, func(w *Writer) {
		w.Buf = append(w.Buf, attributes...)
	}), func(Message) {})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove a flow from the connection tracking table: %w", err)
	}
	return nil
}

func flowRequest(family model.Family, operation uint16, attributes func(*Writer)) *Writer {
	w := &Writer{}
	at := w.Begin(unix.NFNL_SUBSYS_CTNETLINK<<8|operation, 0)
	w.Buf = append(w.Buf, Domain(family), unix.NFNETLINK_V0, 0, 0)
	attributes(w)
	w.End(at)
	return w
}

func flowOf(attributes []byte) Flow {
	f := Flow{Attributes: attributes}
	for kind, value := range Attributes(attributes) {
		switch kind {
		case nl.CTA_TUPLE_ORIG:
			f.Original = tupleOf(value)
		case nl.CTA_TUPLE_REPLY:
			f.Reply = tupleOf(value)
		case nl.CTA_STATUS:
			f.Status = BigUint32(value)
		}
	}
	return f
}

func tupleOf(b []byte) (t Tuple) {
	var source, destination netip.Addr
	for kind, value := range Attributes(Attribute(b, nl.CTA_TUPLE_IP)) {
		switch kind {
		case nl.CTA_IP_V4_SRC, nl.CTA_IP_V6_SRC:
			source, _ = netip.AddrFromSlice(value)
		case nl.CTA_IP_V4_DST, nl.CTA_IP_V6_DST:
			destination, _ = netip.AddrFromSlice(value)
		}
	}
	var sourcePort, destinationPort uint16
	for kind, value := range Attributes(Attribute(b, nl.CTA_TUPLE_PROTO)) {
		switch {
		case kind == nl.CTA_PROTO_NUM && len(value) == 1:
			t.Protocol = value[0]
		case kind == nl.CTA_PROTO_SRC_PORT:
			sourcePort = BigUint16(value)
		case kind == nl.CTA_PROTO_DST_PORT:
			destinationPort = BigUint16(value)
		}
	}
	t.Source, t.Destination = netip.AddrPortFrom(source, sourcePort), netip.AddrPortFrom(destination, destinationPort)
	return t
}
