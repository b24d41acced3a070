// Package programmer is the contract between the wanted state of a node (agent/view) and the code
// that makes the node's kernel follow it. Each programmer has a folder of its own below this one.
package programmer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// Programmer makes a kernel hold a state. Only one goroutine uses it at a time. A programmer
// carries out what the view decided about a Service and makes no decisions of its own.
type Programmer interface {
	// Families returns the IP families that this machine has and the programmer serves, in ascending
	// order. The result never changes. Service ports of another family are left out, because no packet
	// of that family can reach them. The node's primary family is the exception: see CheckPrimary.
	Families() []model.Family
	// Replace makes the kernel hold exactly this state. It reads what the kernel holds and changes the
	// difference, without a moment in which traffic of unchanged Service ports goes elsewhere or
	// nowhere. It is for the start and for repair, and may be called again with the same state.
	//
	// If one IP family fails as a whole, or CheckPrimary returns an error, Replace programs the other
	// family and returns a FamilyError. What the kernel held of the failed family stays in place.
	// PortError and Ordinary say when a family has failed.
	Replace(ctx context.Context, state view.State) error
	// Apply moves the kernel by a difference from the state that the last Replace or Apply left. It
	// does so in one atomic step if the kernel has one. No change may belong to a family for which the
	// last Replace returned a FamilyError. After an error the kernel's state is unknown until a
	// Replace succeeds.
	Apply(ctx context.Context, changes []view.Change) error
	// Cleanup removes everything that this programmer ever made on this machine, in this run or an
	// earlier one. It is no error if there is nothing to remove.
	Cleanup(ctx context.Context) error
}

// Monitor is a Programmer that notices when others remove or change what it programmed, for example
// an administrator or a firewall that is reloaded.
type Monitor interface {
	Programmer
	// Watch calls lost within seconds of such a change, with what it found as the reason. From then on
	// the kernel's state counts as unknown until a Replace succeeds. The caller starts Watch once a
	// Replace has programmed an IP family for the first time. Watch also reports changes from before
	// its start, if they came after that Replace read the kernel's state. It need not report a change
	// that a later Replace has read.
	//
	// lost returns at once. Watch may run while the Programmer is used, and returns when ctx ends.
	Watch(ctx context.Context, lost func(reason string))
}

// Keeper is a Programmer that can find out whether the kernel still serves what an earlier run
// programmed.
type Keeper interface {
	Programmer
	// Intact reports whether the kernel holds, in each IP family, all that does not depend on
	// Services, and some of this state's Service ports, if there are any. It is for a kernel that
	// holds a later state, which is not known. So single Service ports that others have removed do
	// not show, but what happens in practice does: that a table, its chains, the rules in them or
	// all virtual services are gone. It is false for what another version left that is built
	// differently.
	//
	// The caller calls it before the first Replace only. It changes nothing.
	Intact(ctx context.Context, state view.State) bool
}

// HoldsSome reports whether holds returns true for some of a state's Service ports of an IP family,
// or the state has none.
func HoldsSome(state view.State, family model.Family, holds func(view.ServicePortID) bool) bool {
	none := true
	for id := range state.Ports {
		if id.Family == family {
			if holds(id) {
				return true
			}
			none = false
		}
	}
	return none
}

// ErrDraining reports that something which should be removed still leads open connections. A later
// attempt removes it, once those connections have ended.
var ErrDraining = errors.New("connections are still open")

// ErrOrdinary reports that the kernel refuses the Ordinary Service port, so its IP family has
// failed.
var ErrOrdinary = errors.New("the kernel refuses even an ordinary Service port")

// ErrReplaceFirst reports that Apply was called after an operation failed, or before any Replace.
var ErrReplaceFirst = errors.New("the kernel's state is unknown: call Replace first")

// errNoPrimary is the reason of the FamilyError of CheckPrimary.
var errNoPrimary = errors.New("it is the node's primary IP family, that of the Node's first InternalIP, but this " +
	"machine does not support it: install what the agent's log reports as missing at the start, and restart the agent")

// PortError reports that one Service port could not be programmed although others were. Replace and
// Apply return one or several of them, joined with FamilyErrors. After any other error nothing is
// known to be programmed. See Split.
//
// A programmer blames Service ports only while the kernel accepts the Ordinary one of their IP
// family. If the kernel refuses that one, the family has failed, however many Service ports it has.
// The programmer then returns a FamilyError before it changes anything.
type PortError struct {
	ID  view.ServicePortID
	Err error
	// Lasting means that another attempt would fail in the same way. If that can change without a
	// change of the Service, a Monitor reports it.
	Lasting bool
	// Served means that all traffic is led to where it should, only not in the way that the Service
	// asks for. So load balancers may go on using this node.
	Served bool
}

// Error returns the Service port and the reason.
func (e *PortError) Error() string { return fmt.Sprintf("%v: %v", e.ID, e.Err) }

// Unwrap returns the reason.
func (e *PortError) Unwrap() error { return e.Err }

// FamilyError reports that nothing of one IP family is known to be programmed, while the other
// family may be. All or part of what the kernel held of the family before may still be there.
type FamilyError struct {
	Family model.Family
	Err    error
}

// Error returns the family and the reason.
func (e *FamilyError) Error() string {
	return fmt.Sprintf("nothing of %v is programmed: %v", e.Family, e.Err)
}

// Unwrap returns the reason.
func (e *FamilyError) Unwrap() error { return e.Err }

// OfFamily returns what an operation on one IP family reports: err itself if it consists of
// PortErrors, and otherwise a FamilyError with err as the reason.
func OfFamily(family model.Family, err error) error {
	if _, programmed := PortErrors(err); programmed {
		return err
	}
	return &FamilyError{Family: family, Err: err}
}

// CheckPrimary returns a FamilyError if the node's primary IP family is not among families, which
// are those that a programmer serves. A node that lacks its primary family does have Services in
// it: most likely a kernel module or a program is missing. kube-proxy does not start on such a
// node. Slicecast does, and counts the family as failed until the agent is restarted and finds the
// family at its start.
func CheckPrimary(node view.Node, families []model.Family) error {
	if node.Primary == 0 || slices.Contains(families, node.Primary) {
		return nil
	}
	return &FamilyError{Family: node.Primary, Err: errNoPrimary}
}

// DefaultMasqueradeMark is the bit that kube-proxy uses.
const DefaultMasqueradeMark = 1 << 14

// MasqueradeMark returns a mark that a programmer was configured with, or DefaultMasqueradeMark for
// 0. It returns an error if the mark is not a single bit.
func MasqueradeMark(mark uint32) (uint32, error) {
	mark = cmp.Or(mark, DefaultMasqueradeMark)
	if bits.OnesCount32(mark) != 1 {
		return 0, fmt.Errorf("masquerade mark is 0x%x: use a single bit", mark)
	}
	return mark, nil
}

// Ordinary returns a Service port of the plainest kind: TCP, a cluster IP and two backends. Its
// addresses are reserved for documentation, so no cluster has it. A kernel that refuses this
// Service port cannot serve anything in its IP family, for example because a module is missing.
//
// When the kernel refuses Service ports, a programmer tries this one without effect, to find out
// whether the ports or the machine are at fault. The number of refused ports would be misleading:
// one tenant may own all Services of a family, and all of them may need something that the kernel
// lacks.
func Ordinary(family model.Family) *view.ServicePort {
	// all reserved for documentation
	address, backends := "192.0.2.1", []string{"198.51.100.1:80", "198.51.100.2:80"}
	if family == model.IPv6 {
		address, backends = "2001:db8::1", []string{"[2001:db8:1::1]:80", "[2001:db8:1::2]:80"}
	}
	masqueraded := view.Route{To: view.Cluster, Masquerade: true}
	p := &view.ServicePort{
		ID: view.ServicePortID{Service: model.ServiceKey{Name: "ordinary"}, Protocol: model.TCP, Family: family},
		Frontends: []view.Frontend{{
			Kind: view.ClusterIP, Address: netip.MustParseAddr(address), Port: 80,
			Pods: view.Route{To: view.Cluster}, Node: masqueraded, Others: masqueraded,
		}},
	}
	var set []view.Backend
	for _, b := range backends {
		set = append(set, view.Backend{Address: netip.MustParseAddrPort(b)})
	}
	p.Cluster = view.NewBackends(set...)
	return p
}

// Split divides what Replace or Apply returned into the Service ports and the IP families that
// failed, each with its reason. An error that is neither a PortError nor a FamilyError becomes the
// reason of all given families, which are those of the programmer.
func Split(err error, families []model.Family) (ports []*PortError, failed map[model.Family]error) {
	failed = make(map[model.Family]error)
	ports, rest := split(err, failed)
	if rest != nil {
		for _, f := range families {
			failed[f] = rest
		}
	}
	return ports, failed
}

// split adds the FamilyErrors in err to failed. It returns the PortErrors in err, and everything
// else that err holds as rest.
func split(err error, failed map[model.Family]error) (ports []*PortError, rest error) {
	switch e := err.(type) { //nolint:errorlint // a wrapping error may be about more than what it wraps
	case nil:
		return nil, nil
	case *PortError:
		return []*PortError{e}, nil
	case *FamilyError:
		failed[e.Family] = e.Err
		return nil, nil
	case interface{ Unwrap() []error }:
		known := len(failed)
		var others []error
		for _, one := range e.Unwrap() {
			more, other := split(one, failed)
			ports = append(ports, more...)
			if other != nil {
				others = append(others, other)
			}
		}
		if len(others) > 0 && len(ports) == 0 && len(failed) == known {
			return nil, err // keeps the text of the wrapping error
		}
		return ports, errors.Join(others...)
	}
	return nil, err
}

// PortErrors returns the PortErrors in err. ok is false if err holds anything else as well.
func PortErrors(err error) (ports []*PortError, ok bool) {
	failed := make(map[model.Family]error)
	ports, rest := split(err, failed)
	if rest != nil || len(failed) > 0 {
		return nil, false
	}
	return ports, true
}
