// This file tells the runner when an agent has programmed every earlier change, by changing a
// Service of its own twice and watching for it in the kernel.
package conformance

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
)

const canaryNamespace = "conformance-canary"

// syncTimeout returns the bound of the time in which an agent programs a change, or starts and
// programs the current state, on a busy machine.
func syncTimeout() time.Duration { return time.Duration(*patience) * time.Minute }

// canaryObjects is a Service and its slices. Their ports are the number of the change. No case uses
// the addresses of the Service and its endpoints.
const canaryObjects = `
apiVersion: v1
kind: Namespace
metadata: {name: ` + canaryNamespace + `}
---
apiVersion: v1
kind: Service
metadata: {name: canary, namespace: ` + canaryNamespace + `}
spec:
  clusterIP: 10.96.255.1
  clusterIPs: [10.96.255.1, "fd00:10:96::ff01"]
  ipFamilyPolicy: RequireDualStack
  ipFamilies: [IPv4, IPv6]
  ports:
    - {port: %[1]d, protocol: TCP}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: canary-v4, namespace: ` + canaryNamespace + `, labels: {kubernetes.io/service-name: canary}}
addressType: IPv4
ports:
  - {name: '', port: %[1]d, protocol: TCP}
endpoints:
  - addresses: [10.180.255.1]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: canary-v6, namespace: ` + canaryNamespace + `, labels: {kubernetes.io/service-name: canary}}
addressType: IPv6
ports:
  - {name: '', port: %[1]d, protocol: TCP}
endpoints:
  - addresses: ["fd00:10:180:ff::1"]
`

// awaitSync waits until the agent has programmed every earlier change of Services and slices. It is
// an error if the agent does not. The canary changes twice, one after the other. If the agent
// received the first change together with earlier ones, it may program the canary before the
// others. Once the agent starts to program the second change, however, it has programmed all of
// them.
func (s *stage) awaitSync(t *testing.T) error {
	t.Helper()
	for range 2 {
		s.canary++
		port := uint16(10000 + s.canary%50000)
		objects, err := parseObjects(fmt.Sprintf(canaryObjects, port))
		require.NoError(t, err)
		require.NoError(t, s.cluster.Apply(t.Context(), objects))
		openings := []Opening{
			{From: s.pods.Host, Proto: TCP, Src: anyPort("10.180.0.200"), Dst: addrPort("10.96.255.1", port)},
			{From: s.pods.Host, Proto: TCP, Src: anyPort("fd00:10:180::200"), Dst: addrPort("fd00:10:96::ff01", port)},
		}
		ctx, cancel := context.WithTimeout(t.Context(), syncTimeout())
		err = testenv.WaitFor(ctx, func() error {
			require.NoError(t, s.subject.Check())
			fates, err := s.wire.Open(t.Context(), openings, 20*time.Millisecond)
			require.NoError(t, err)
			for i := range fates {
				if f := &fates[i]; f.At != s.outside.Host || f.SeenDst == f.Dst {
					return fmt.Errorf("%s has not programmed a change: %s", s.subject.Name(), describe(fates))
				}
			}
			return nil
		})
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

func anyPort(addr string) netip.AddrPort { return addrPort(addr, 0) }

func addrPort(addr string, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(addr), port)
}
