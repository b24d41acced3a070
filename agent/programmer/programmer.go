// Package programmer is the contract between what a node should do (agent/view) and what makes its kernel do it. Each
// programmer has a folder of its own below.
package programmer

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// Programmer makes a kernel hold a state. It is used by one goroutine at a time. A programmer has no opinions of its
// own about Services.
type Programmer interface {
	// Families returns the IP families that this machine has and the programmer serves, ascending. It
	// returns the same ones each time. What is wanted in another family is left out, as nothing can come
	// to it, unless it is the node's primary family: see CheckPrimary.
	Families() []model.Family
	// Replace makes the kernel hold exactly this state: it reads what is there and changes the
	// difference, without a moment in which traffic of unchanged Service ports goes elsewhere or
	// nowhere. It is for the start and for repair, and may be called again with the same state. If
	// one IP family fails as a whole, or CheckPrimary returns an error, Replace goes on with the
	// other one and returns a FamilyError. What the kernel held of the failed family stays, so that
	// it goes on as it was: see PortError and Ordinary for what is a failed family.
	Replace(ctx context.Context, state view.State) error
	// Apply moves the kernel by a difference from what the last Replace or Apply left, in one atomic step where the
	// kernel has one. No change is of a family that the last Replace returned a FamilyError for. After an error the
	// kernel's state is unknown until a Replace succeeds.
	Apply(ctx context.Context, changes []view.Change) error
	// Cleanup removes everything that this programmer ever made on this machine, also in earlier runs; nothing there is
	// no error.
	Cleanup(ctx context.Context) error
}

// Monitor is a Programmer that notices when others, e.g. an administrator or a firewall that is reloaded, remove or change
// what it programmed.
type Monitor interface {
	Programmer
	// Watch calls lost, saying what it found, within seconds of such a change; what the kernel holds counts as unknown
	// then, until a Replace succeeds. It is called when a Replace has first programmed an IP family, and also tells of what was changed before, after
	// that Replace read it. What a later Replace has read need not be told. lost returns at once. It may run while the Programmer is used, and returns when ctx ends.
	Watch(ctx context.Context, lost func(reason string))
}

// ErrDraining tells that what is to be removed leads connections that are still open. It is removed when it is tried again
// and they have ended.
var ErrDraining = errors.New("connections are still open")

// PortError tells that one Service port could not be programmed while the others were. Replace and Apply return one or
// several, joined with FamilyErrors; any other error means that nothing is known to be programmed. See Split.
//
// A programmer blames Service ports only while the kernel takes the Ordinary one of their IP
// family. If it does not, the family has failed, however many Service ports are wanted in it, and
// the programmer returns a FamilyError before it changes anything.
type PortError struct {
	ID  view.ServicePortID
	Err error
	// Lasting: to try the same again would be in vain. If that changes otherwise than by a change of the Service, a Monitor tells.
	Lasting bool
}

// Error names the Service port and the reason.
func (e *PortError) Error() string { return fmt.Sprintf("%v: %v", e.ID, e.Err) }

// Unwrap gives the reason.
func (e *PortError) Unwrap() error { return e.Err }

// FamilyError reports that nothing of one IP family is known to be programmed, while the other family
// may be. What the kernel held of the family before may still be there, or a part of it.
type FamilyError struct {
	Family model.Family
	Err    error
}

// Error names the family and the reason.
func (e *FamilyError) Error() string {
	return fmt.Sprintf("nothing of %v is programmed: %v", e.Family, e.Err)
}

// Unwrap returns the reason.
func (e *FamilyError) Unwrap() error { return e.Err }

// CheckPrimary returns a FamilyError if the node's primary IP family is not among these, which a programmer
// serves. A node without its primary family is not one without Services: most likely a kernel module or a
// program is missing. As kube-proxy does not start there, the family counts as failed until an agent finds it
// when it starts.
func CheckPrimary(node view.Node, families []model.Family) error {
	if node.Primary == 0 || slices.Contains(families, node.Primary) {
		return nil
	}
	return &FamilyError{Family: node.Primary, Err: errNoPrimary}
}

// Ordinary returns a Service port of the plainest kind, which no cluster has: TCP, a cluster IP,
// two backends. A kernel that refuses it can serve nobody in this IP family, e.g. because a module
// is missing. So when Service ports are refused, a programmer tries this one, without effect, to
// find out whether they or the machine are at fault. To count the refused ones instead would let
// one tenant, whose Services are the only ones of a family and need what the kernel does not have,
// pass for a broken machine.
func Ordinary(family model.Family) *view.ServicePort {
	address, backends := "192.0.2.1", []string{"198.51.100.1:80", "198.51.100.2:80"} // all for documentation
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

var errNoPrimary = errors.New("it is the node's primary IP family, that of its Node's first InternalIP, and this machine does not have it or can't " +
	"program it; the agent's log has from its start what is missing: install it or load its kernel module, and restart the agent")

// Split divides what Replace or Apply returned into the Service ports and the IP families that failed,
// each with its reason. An error that is neither is the reason of all given families: those of the
// programmer.
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

// split adds the FamilyErrors in err to failed, and returns the PortErrors in it and what else there is.
func split(err error, failed map[model.Family]error) (ports []*PortError, rest error) {
	switch e := err.(type) { //nolint:errorlint // of what is wrapped by others it is not known how much it says
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
			return nil, err // with all of its text
		}
		return ports, errors.Join(others...)
	}
	return nil, err
}

// PortErrors gives the PortErrors in err. ok is false if err holds anything else too.
func PortErrors(err error) (ports []*PortError, ok bool) {
	failed := make(map[model.Family]error)
	ports, rest := split(err, failed)
	if rest != nil || len(failed) > 0 {
		return nil, false
	}
	return ports, true
}
