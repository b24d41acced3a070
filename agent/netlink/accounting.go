package netlink

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// These constants are those of linux/netfilter/nfnetlink.h and linux/netfilter/nfnetlink_acct.h
// that the libraries lack.
const (
	subsystemAccounting = 7 // NFNL_SUBSYS_ACCT
	newCounter          = 0 // NFNL_MSG_ACCT_NEW
	getCounter          = 1 // NFNL_MSG_ACCT_GET
	removeCounter       = 3 // NFNL_MSG_ACCT_DEL
	counterName         = 1 // NFACCT_NAME
	counterPackets      = 2 // NFACCT_PKTS
)

// AddCounter creates a counter that rules of iptables refer to by its name (-m nfacct). It is no
// error if the counter exists. Names have at most 31 bytes.
func (s *Socket) AddCounter(name string) error {
	err := s.Get(counterRequest(newCounter, name), func(Message) {})
	if err != nil && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("create the counter %s: %w", name, err)
	}
	return nil
}

// RemoveCounter removes a counter. It is no error if the counter does not exist, or if a rule still
// refers to it.
func (s *Socket) RemoveCounter(name string) error {
	err := s.Get(counterRequest(removeCounter, name), func(Message) {})
	switch {
	case err == nil, errors.Is(err, unix.ENOENT), errors.Is(err, unix.EBUSY):
		return nil
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP): // the kernel has no counters
		return nil
	}
	return fmt.Errorf("remove the counter %s: %w", name, err)
}

// CounterPackets returns how many packets a counter has counted.
func (s *Socket) CounterPackets(name string) (packets uint64, err error) {
	err = s.Get(counterRequest(getCounter, name), func(m Message) {
		if b := Attribute(m.Attributes(nl.SizeofNfgenmsg), counterPackets); len(b) == 8 {
			packets = binary.BigEndian.Uint64(b)
		}
	})
	if err != nil {
		return 0, fmt.Errorf("read the counter %s: %w", name, err)
	}
	return packets, nil
}

func counterRequest(operation uint16, name string) *Writer {
	w := &Writer{}
	at := w.Begin(subsystemAccounting<<8|operation, 0)
	w.Buf = append(w.Buf, unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0)
	w.Text(counterName, name)
	w.End(at)
	return w
}
