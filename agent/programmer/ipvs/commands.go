package ipvs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/view"
)

// Commands of IPVS and their attributes, from include/uapi/linux/ip_vs.h. The library sends the
// others.
const (
	commandNewService = 1
	commandSetService = 2
	commandDelService = 3
	commandGetService = 4
	commandNewBackend = 5
	commandSetBackend = 6
	commandDelBackend = 7
	commandGetBackend = 8

	attrService = 1
	attrBackend = 2

	svcAttrFamily    = 1
	svcAttrProtocol  = 2
	svcAttrAddress   = 3
	svcAttrPort      = 4
	svcAttrMark      = 5
	svcAttrScheduler = 6
	svcAttrFlags     = 7
	svcAttrTimeout   = 8
	svcAttrNetmask   = 9

	destAttrAddress  = 1
	destAttrPort     = 2
	destAttrMethod   = 3 // 0 means by address translation
	destAttrWeight   = 4
	destAttrUpper    = 5
	destAttrLower    = 6
	destAttrActive   = 7
	destAttrInactive = 8

	genericVersion = 1
	genericHeader  = 4 // length of the header of generic netlink, in bytes
)

type command struct {
	kind    byte
	service serviceKey
	virtual *virtual       // set in commandNewService and commandSetService
	backend netip.AddrPort // set in commands for backends
	weight  uint32
	// owner is the Service port to which an error is attributed. Zero means none.
	owner view.ServicePortID
	tries int
}

func (c *command) removes() bool { return c.kind == commandDelService || c.kind == commandDelBackend }
func (c *command) drains() bool  { return c.kind == commandSetBackend && c.weight == 0 }

// String describes the operation, for errors.
func (c *command) String() string {
	switch c.kind {
	case commandNewService, commandSetService:
		return fmt.Sprintf("create the IPVS virtual service %v with scheduler %s", c.service, c.virtual.scheduler)
	case commandDelService:
		return fmt.Sprintf("remove IPVS' virtual service %v", c.service)
	case commandDelBackend:
		return fmt.Sprintf("remove backend %v from IPVS", c.backend)
	}
	if c.weight == 0 {
		return fmt.Sprintf("drain backend %v of IPVS", c.backend)
	}
	return fmt.Sprintf("add backend %v to IPVS", c.backend)
}

func (c *command) write(w *netlink.Writer, generic uint16) {
	at := w.Begin(generic, 0)
	w.Buf = append(w.Buf, c.kind, genericVersion, 0, 0)
	c.service.write(w, c.virtual)
	if c.backend.IsValid() {
		nested := w.Nest(attrBackend)
		w.Bytes(destAttrAddress, c.backend.Addr().AsSlice())
		w.BigUint16(destAttrPort, c.backend.Port())
		if c.kind != commandDelBackend {
			w.Uint32(destAttrMethod, 0)
			w.Uint32(destAttrWeight, c.weight)
			w.Uint32(destAttrUpper, 0)
			w.Uint32(destAttrLower, 0)
		}
		w.Close(nested)
	}
	w.End(at)
}

// write appends the attributes that identify a virtual service, and all others if v is not nil.
func (k serviceKey) write(w *netlink.Writer, v *virtual) {
	at := w.Nest(attrService)
	w.Uint16(svcAttrFamily, uint16(netlink.Domain(k.family)))
	if k.number != 0 {
		w.Uint32(svcAttrMark, markTag|k.number)
	} else {
		w.Uint16(svcAttrProtocol, uint16(nft.ProtocolNumber(k.protocol)))
		w.Bytes(svcAttrAddress, k.address.AsSlice())
		w.BigUint16(svcAttrPort, k.port)
	}
	if v != nil {
		s := v.settings()
		w.Text(svcAttrScheduler, s.scheduler)
		const valid = ^uint32(0) // mask of the flags that are set
		w.Bytes(svcAttrFlags, binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, s.flags), valid))
		w.Uint32(svcAttrTimeout, s.timeout)
		w.Uint32(svcAttrNetmask, s.netmask)
	}
	w.Close(at)
}

// maxTries is how often a command is tried, possibly in another form. Each error has one remedy.
const maxTries = 3

// run carries out commands in their order. It records errors that concern a single Service port in
// x. If there are any, it tries an ordinary Service port, and returns an error if IPVS refuses that
// one as well.
func (f *family) run(x *change, commands []command) error {
	blamed := len(x.errs)
	for len(commands) > 0 {
		var again []command
		var fatal error
		err := f.ipvs.execute(commands, func(i int, refusal *netlink.Error) {
			c := commands[i]
			c.tries++
			retry, err := f.remedy(x, &c, refusal)
			switch {
			case retry && c.tries < maxTries:
				again = append(again, c)
			case err != nil && fatal == nil:
				fatal = err
			}
		})
		if err != nil || fatal != nil {
			return errors.Join(err, fatal)
		}
		commands = again
	}
	if len(x.errs) > blamed {
		return f.checkOrdinary()
	}
	return nil
}

// remedy changes a failed command so that it can be tried again, or returns what its error means.
func (f *family) remedy(x *change, c *command, refusal *netlink.Error) (retry bool, _ error) {
	errno, err := refusal.Errno, fmt.Errorf("%v: %w", c, refusal)
	switch {
	case c.removes() && (errno == unix.ENOENT || errno == unix.ESRCH), c.drains() && errno == unix.ENOENT:
		return false, nil // already as wanted
	case c.kind == commandNewService && errno == unix.EEXIST:
		c.kind = commandSetService
		x.adopted = append(x.adopted, c.virtual)
		return true, err
	case c.kind == commandSetService && errno == unix.ESRCH:
		c.kind = commandNewService
		return true, err
	case c.kind == commandNewBackend && errno == unix.EEXIST:
		c.kind = commandSetBackend
		return true, err
	case c.kind == commandSetBackend && errno == unix.ENOENT:
		c.kind = commandNewBackend
		return true, err
	case c.virtual != nil && errno == unix.ENOENT && c.virtual.scheduler != f.options.Scheduler:
		x.blameScheduler(c.virtual, fmt.Errorf("this node has no IPVS scheduler %s (kernel module ip_vs_%s), using the default: %w",
			c.virtual.scheduler, c.virtual.scheduler, refusal))
		f.lacking[c.virtual.scheduler] = true
		plain := *c.virtual
		plain.scheduler = f.options.Scheduler
		c.virtual = &plain
		return true, err
	case c.backend.IsValid() && errno == unix.ESRCH && c.tries < maxTries:
		return true, err // the virtual service will exist next time, or has failed itself
	case c.owner != (view.ServicePortID{}) && (errno == unix.EINVAL || c.backend.IsValid() && errno == unix.ESRCH):
		// For example, IPVS refuses backends whose address nothing can be sent to.
		x.blame(c.owner, err, false)
		if blamed := f.ports[c.owner]; blamed != nil {
			blamed.refused = true
		}
		return false, nil
	}
	return false, err
}
