// These tests prove that no tenant can hide a change by choosing the content of an object. They
// replay two attacks that worked against an earlier design.
package store

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
)

// These annotations were computed as an attack on an earlier design, in which versions were 64 bits
// of xxhash and digests were sums of versions. The attack took milliseconds. With sameVersion, a
// tenant's Service had the same version before and after a change. With sameSum, it compensated for
// an endpoint that another tenant's slice lost.
const (
	sameVersion = "00936jF{F:|;o"
	sameSum     = "10965uJ5'9:m{"
)

func tenantsService(annotation string, externalIPs ...netip.Addr) *model.Service {
	return model.NewService(model.Service{
		Namespace: "tenant", Name: "web", Type: model.ClusterIP, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.9")},
		ExternalIPs: externalIPs, Ports: []model.ServicePort{{Name: "http", Protocol: model.TCP, Port: 80}}, IPVSScheduler: annotation,
	})
}

func victimsSlice(endpoints int) *model.Slice {
	s := model.Slice{
		Namespace: "victim", Name: "db-1", Service: "db", Family: model.IPv4,
		Ports: []model.SlicePort{{Name: "sql", Protocol: model.TCP, Port: 5432}},
	}
	for i := range endpoints {
		s.Endpoints = append(s.Endpoints, model.Endpoint{
			Address: netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), Conditions: model.Conditions{Ready: true, Serving: true},
		})
	}
	return model.NewSlice(s)
}

// TestForgedVersion requires a change of an object to be published, whatever content its author
// chooses.
func TestForgedVersion(t *testing.T) {
	s := synced(t, Options{Shards: 1})
	s.Upsert(tenantsService("wrr", netip.MustParseAddr("192.0.2.7")), 1)
	require.Len(t, s.Publish().Updates, 1)
	s.Upsert(tenantsService(sameVersion), 2)
	require.Len(t, s.Publish().Updates, 1)
}

// TestForgedDigest requires that a tenant cannot compensate for an endpoint that is removed from
// another tenant's slice. Otherwise a node that was away during the change would keep the endpoint
// forever.
func TestForgedDigest(t *testing.T) {
	digest := func(objects ...model.Object) any {
		s := synced(t, Options{Shards: 1})
		for _, o := range objects {
			s.Upsert(o, 1)
		}
		s.Publish()
		return s.Snapshot(0).Digest()
	}
	held := digest(victimsSlice(2), tenantsService("wrr"))
	require.Equal(t, held, digest(tenantsService("wrr"), victimsSlice(2)))
	require.NotEqual(t, held, digest(victimsSlice(1), tenantsService(sameSum)))
}
