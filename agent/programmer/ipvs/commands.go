package ipvs

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

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
	destAttrFamily   = 11

	genericVersion = 1
)

// command is one operation of IPVS.
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

// String describes the operation, for errors.
func (c *command) String() string {
	switch c.kind {
	case commandNewService, commandSetService:
		return fmt.Sprintf("make IPVS' virtual service %v with the scheduler %s", c.service, c.virtual.scheduler)
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

// write appends the message of the command.
func (c *command) write(r *requests, family uint16) {
	r.begin(family, 0)
	r.buf = append(r.buf, c.kind, genericVersion, 0, 0)
	c.service.write(r, c.virtual)
	if c.backend.IsValid() {
		at := r.nest(attrBackend)
		r.bytes(destAttrAddress, c.backend.Addr().AsSlice())
		r.port(destAttrPort, c.backend.Port())
		if c.kind != commandDelBackend {
			r.uint32(destAttrMethod, 0)
			r.uint32(destAttrWeight, c.weight)
			r.uint32(destAttrUpper, 0)
			r.uint32(destAttrLower, 0)
		}
		r.endNest(at)
	}
	r.end()
}

// write appends the attributes that identify a virtual service, and all others if v is not nil.
func (k serviceKey) write(r *requests, v *virtual) {
	at := r.nest(attrService)
	s := k.moby()
	r.uint16(svcAttrFamily, s.AddressFamily)
	if s.FWMark != 0 {
		r.uint32(svcAttrMark, s.FWMark)
	} else {
		r.uint16(svcAttrProtocol, s.Protocol)
		r.bytes(svcAttrAddress, s.Address)
		r.port(svcAttrPort, s.Port)
	}
	if v != nil {
		s = v.moby()
		r.text(svcAttrScheduler, s.SchedName)
		flags := r.nest(svcAttrFlags)
		r.buf = append(r.buf, host32(s.Flags)...)
		r.buf = append(r.buf, host32(^uint32(0))...) // mask of valid flags
		r.endNest(flags)
		r.uint32(svcAttrTimeout, s.Timeout)
		r.uint32(svcAttrNetmask, s.Netmask)
	}
	r.endNest(at)
}

// nobody stands for no Service port.
var nobody view.ServicePortID

// maxTries is how often a command is tried, possibly in another form. Each error has one remedy.
const maxTries = 3

// run carries out commands in their order. It records errors that concern a single Service port in
// x. If there are any, it tries an ordinary Service port, and returns an error if IPVS refuses that
// one as well.
func (f *family) run(x *change, commands []command) error {
	blamed := len(x.errs)
	for len(commands) > 0 {
		f.requests.reset()
		for i := range commands {
			commands[i].write(&f.requests, f.ipvsFamily)
		}
		var again []command
		var fatal error
		err := f.commands.execute(&f.requests, func(i int, errno unix.Errno) {
			c := commands[i]
			c.tries++
			retry, err := f.remedy(x, &c, errno)
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
func (f *family) remedy(x *change, c *command, errno unix.Errno) (retry bool, _ error) {
	err := fmt.Errorf("%v: %w", c, errno)
	switch {
	case c.kind == commandDelService && errno == unix.ESRCH, c.kind == commandDelBackend && (errno == unix.ENOENT || errno == unix.ESRCH):
		return false, nil // already as wanted
	case c.kind == commandSetBackend && c.weight == 0 && errno == unix.ENOENT:
		return false, nil
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
		x.blame(c.owner, fmt.Errorf("this node has no IPVS scheduler %s (kernel module ip_vs_%s), the default serves it: %w",
			c.virtual.scheduler, c.virtual.scheduler, errno), true)
		f.lacking[c.virtual.scheduler] = true
		plain := *c.virtual
		plain.scheduler = f.options.Scheduler
		c.virtual = &plain
		return true, err
	case c.backend.IsValid() && errno == unix.ESRCH && c.tries < maxTries:
		return true, err // the virtual service will exist next time, or has failed itself
	case c.owner != nobody && (errno == unix.EINVAL || c.backend.IsValid() && errno == unix.ESRCH):
		// For example, IPVS refuses backends whose address nothing can be sent to.
		x.blame(c.owner, err, false)
		if blamed := f.ports[c.owner]; blamed != nil {
			blamed.refused = true
		}
		return false, nil
	}
	return false, err
}
