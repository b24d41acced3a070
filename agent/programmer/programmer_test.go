// These tests prove that Split divides a programmer's error into Service ports and IP families
// without losing any of it, and that the Service port by which kernels are judged is an ordinary
// one.
package programmer

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// TestSplit asserts that Split never reports less than the error says.
func TestSplit(t *testing.T) {
	both := []model.Family{model.IPv4, model.IPv6}
	port := &PortError{ID: view.ServicePortID{Port: "a"}, Err: errors.New("no such port")}
	another := &PortError{ID: view.ServicePortID{Port: "b"}, Err: errors.New("no such port")}
	locked, broken := errors.New("locked"), errors.New("broken")
	six := &FamilyError{Family: model.IPv6, Err: locked}
	several := fmt.Errorf("%w, and then %w", locked, broken)
	for name, c := range map[string]struct {
		err    error
		ports  []*PortError
		failed map[model.Family]error
	}{
		"none":                      {nil, nil, map[model.Family]error{}},
		"Service ports":             {errors.Join(port, nil, errors.Join(another)), []*PortError{port, another}, map[model.Family]error{}},
		"a family":                  {errors.Join(port, errors.Join(six, another)), []*PortError{port, another}, map[model.Family]error{model.IPv6: locked}},
		"anything else":             {locked, nil, map[model.Family]error{model.IPv4: locked, model.IPv6: locked}},
		"anything else, of several": {several, nil, map[model.Family]error{model.IPv4: several, model.IPv6: several}},
		"a Service port, wrapped":   {fmt.Errorf("of web: %w", port), nil, map[model.Family]error{model.IPv4: fmt.Errorf("of web: %w", port), model.IPv6: fmt.Errorf("of web: %w", port)}},
		"all kinds": {errors.Join(port, six, broken), []*PortError{port},
			map[model.Family]error{model.IPv4: errors.Join(broken), model.IPv6: errors.Join(broken)}},
	} {
		t.Run(name, func(t *testing.T) {
			ports, failed := Split(c.err, both)
			require.Equal(t, c.ports, ports)
			require.Equal(t, c.failed, failed)
			_, ok := PortErrors(c.err)
			require.Equal(t, len(failed) == 0, ok)
		})
	}
}

// TestOrdinary asserts that the Service port by which kernels are judged belongs to its family
// alone and needs nothing special.
func TestOrdinary(t *testing.T) {
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		p := Ordinary(family)
		require.Equal(t, family, p.ID.Family)
		require.Equal(t, model.TCP, p.ID.Protocol)
		require.Len(t, p.Frontends, 1)
		require.Equal(t, family, model.FamilyOf(p.Frontends[0].Address))
		require.Equal(t, 2, p.Cluster.Len())
		for _, b := range p.Cluster.List() {
			require.Equal(t, family, model.FamilyOf(b.Address.Addr()))
		}
	}
}
