// Package programmer is the contract between what a node should do (agent/view) and what makes its kernel do it. Each
// programmer has a folder of its own below.
package programmer

import (
	"context"
	"errors"
	"fmt"
	"iter"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// Programmer makes a kernel hold a state. It is used by one goroutine at a time. A programmer has no opinions of its
// own about Services.
type Programmer interface {
	// Replace makes the kernel hold exactly this state: it reads what is there and changes the difference, without a
	// moment in which traffic of unchanged Service ports goes elsewhere or nowhere. It is for the start and for repair,
	// and may be called again with the same state.
	Replace(ctx context.Context, state view.State) error
	// Apply moves the kernel by a difference from what the last Replace or Apply left, in one atomic step where the
	// kernel has one. After an error the kernel's state is unknown until a Replace succeeds.
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
	// then, until a Replace succeeds. It is called when the first Replace has succeeded, and also tells of what was changed before, after
	// that Replace read it. What a later Replace has read need not be told. lost returns at once. It may run while the Programmer is used, and returns when ctx ends.
	Watch(ctx context.Context, lost func(reason string))
}

// ErrDraining tells that what is to be removed leads connections that are still open. It is removed when it is tried again
// and they have ended.
var ErrDraining = errors.New("connections are still open")

// PortError tells that one Service port could not be programmed while the others were. Replace and Apply return one or
// several, joined; any other error means that nothing is known to be programmed.
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

// LeftOut gives the PortErrors of a family of which nothing can be programmed while the other one is: of each of these Service ports that is of the
// family, once. The reason is the same for all, and short, as there may be many of them.
func LeftOut(family model.Family, ids ...iter.Seq[view.ServicePortID]) error {
	reason := fmt.Errorf("nothing of %v can be programmed; the agent's log says why", family)
	var errs []error
	seen := make(map[view.ServicePortID]bool)
	for _, some := range ids {
		for id := range some {
			if id.Family == family && !seen[id] {
				seen[id] = true
				errs = append(errs, &PortError{ID: id, Err: reason})
			}
		}
	}
	return errors.Join(errs...)
}

// PortErrors gives the PortErrors in err. ok is false if err holds anything else too.
func PortErrors(err error) (ports []*PortError, ok bool) {
	if err == nil {
		return nil, true
	}
	if joined, isJoin := err.(interface{ Unwrap() []error }); isJoin {
		for _, e := range joined.Unwrap() {
			more, all := PortErrors(e)
			if !all {
				return nil, false
			}
			ports = append(ports, more...)
		}
		return ports, true
	}
	var p *PortError
	if errors.As(err, &p) {
		return []*PortError{p}, true
	}
	return nil, false
}
