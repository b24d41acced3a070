// These tests prove that each list of an object is kept up to its bound, and that what is left out
// is reported once, with the name of the list.
package source

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/slicecast/slicecast/internal/model"
)

// ip4 and ip6 return the nth address of a family.
func ip4(n int) string {
	return netip.AddrFrom4([4]byte{100, byte(n >> 16), byte(n >> 8), byte(n)}).String()
}

func ip6(n int) string { return fmt.Sprintf("2001:db8::%x:%x", n>>16+1, n&0xffff+1) }

func repeated[T any](n int, entry func(i int) T) (out []T) {
	for i := range n {
		out = append(out, entry(i))
	}
	return out
}

// TestListsAreBounded checks that lists are kept up to their bounds, and that what is left out is
// reported once, with the list's name.
func TestListsAreBounded(t *testing.T) {
	endpoints := func(change func(*discoveryv1.EndpointSlice, int)) func(int) (model.Keyed, []Skip) {
		return func(n int) (model.Keyed, []Skip) {
			s := &discoveryv1.EndpointSlice{
				ObjectMeta:  metav1.ObjectMeta{Name: "s", Namespace: "default", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
				AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.1"}}},
			}
			change(s, n)
			_, o, skips := NewConverter("").Convert(s)
			return o, skips
		}
	}
	web := func(change func(*corev1.Service, int)) func(int) (model.Keyed, []Skip) {
		return func(n int) (model.Keyed, []Skip) {
			_, o, skips := NewConverter("").Convert(service(func(s *corev1.Service) {
				s.Spec.Type = corev1.ServiceTypeLoadBalancer
				change(s, n)
			}))
			return o, skips
		}
	}
	for name, c := range map[string]struct {
		field   string
		most    int
		convert func(n int) (model.Keyed, []Skip)
		kept    func(model.Keyed) int
	}{
		"external IPs": {"spec.externalIPs", model.MaxFrontends,
			web(func(s *corev1.Service, n int) { s.Spec.ExternalIPs = repeated(n, ip4) }),
			func(o model.Keyed) int { return len(o.(*model.Service).ExternalIPs) }},
		"external IPs of both families": {"spec.externalIPs", model.MaxFrontends,
			web(func(s *corev1.Service, n int) {
				s.Spec.ExternalIPs = append(repeated(model.MaxFrontends, ip4), append(repeated(n, ip6), ip4(1))...)
			}),
			func(o model.Keyed) int { return len(o.(*model.Service).ExternalIPs) - model.MaxFrontends }},
		"ingress": {"status.loadBalancer.ingress", model.MaxFrontends,
			web(func(s *corev1.Service, n int) {
				s.Status.LoadBalancer.Ingress = repeated(n, func(i int) corev1.LoadBalancerIngress { return corev1.LoadBalancerIngress{IP: ip6(i)} })
			}),
			func(o model.Keyed) int { return len(o.(*model.Service).LoadBalancerIngress) }},
		"source ranges": {"spec.loadBalancerSourceRanges", model.MaxFrontends,
			web(func(s *corev1.Service, n int) {
				s.Spec.LoadBalancerSourceRanges = repeated(n, func(i int) string { return ip4(i) + "/32" })
			}),
			func(o model.Keyed) int { return len(o.(*model.Service).LoadBalancerSourceRanges) }},
		"ports": {"spec.ports", model.MaxFrontends,
			web(func(s *corev1.Service, n int) {
				s.Spec.Ports = repeated(n, func(i int) corev1.ServicePort {
					return corev1.ServicePort{Name: fmt.Sprint("p", i), Port: int32(i + 1)}
				})
			}),
			func(o model.Keyed) int { return len(o.(*model.Service).Ports) }},
		"endpoints": {"endpoints", model.MaxEndpoints,
			endpoints(func(s *discoveryv1.EndpointSlice, n int) {
				s.Endpoints = repeated(n, func(i int) discoveryv1.Endpoint { return discoveryv1.Endpoint{Addresses: []string{ip4(i)}} })
			}),
			func(o model.Keyed) int { return len(o.(*model.Slice).Endpoints) }},
		"endpoint ports": {"ports", model.MaxSlicePorts,
			endpoints(func(s *discoveryv1.EndpointSlice, n int) {
				s.Ports = repeated(n, func(i int) discoveryv1.EndpointPort {
					return discoveryv1.EndpointPort{Name: ptr.To(fmt.Sprint("p", i)), Port: ptr.To(int32(i%65535 + 1))}
				})
			}),
			func(o model.Keyed) int { return len(o.(*model.Slice).Ports) }},
		"zone hints": {"endpoints.hints.forZones", model.MaxHints,
			endpoints(func(s *discoveryv1.EndpointSlice, n int) {
				s.Endpoints[0].Hints = &discoveryv1.EndpointHints{
					ForZones: repeated(n, func(i int) discoveryv1.ForZone { return discoveryv1.ForZone{Name: fmt.Sprint(i)} }),
				}
			}),
			func(o model.Keyed) int { return len(o.(*model.Slice).Endpoints[0].ZoneHints) }},
		"node hints": {"endpoints.hints.forNodes", model.MaxHints,
			endpoints(func(s *discoveryv1.EndpointSlice, n int) {
				s.Endpoints[0].Hints = &discoveryv1.EndpointHints{
					ForNodes: repeated(n, func(i int) discoveryv1.ForNode { return discoveryv1.ForNode{Name: fmt.Sprint(i)} }),
				}
			}),
			func(o model.Keyed) int { return len(o.(*model.Slice).Endpoints[0].NodeHints) }},
		"node addresses": {"status.addresses", model.MaxNodeAddresses,
			func(n int) (model.Keyed, []Skip) {
				_, o, skips := NewConverter("").Convert(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}, Status: corev1.NodeStatus{
					Addresses: repeated(n, func(i int) corev1.NodeAddress {
						return corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: ip4(i)}
					}),
				}})
				return o, skips
			},
			func(o model.Keyed) int { return len(o.(*model.Node).Addresses) }},
		"pod CIDRs": {"spec.podCIDRs", model.MaxCIDRs,
			func(n int) (model.Keyed, []Skip) {
				_, o, skips := NewConverter("").Convert(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}, Spec: corev1.NodeSpec{
					PodCIDRs: repeated(n, func(i int) string { return ip4(i) + "/32" }),
				}})
				return o, skips
			},
			func(o model.Keyed) int { return len(o.(*model.Node).PodCIDRs) }},
		"service CIDRs": {"spec.cidrs", model.MaxCIDRs,
			func(n int) (model.Keyed, []Skip) {
				_, o, skips := NewConverter("").Convert(&networkingv1.ServiceCIDR{Spec: networkingv1.ServiceCIDRSpec{
					CIDRs: repeated(n, func(i int) string { return ip4(i) + "/32" }),
				}})
				return o, skips
			},
			func(o model.Keyed) int { return len(o.(*ServiceCIDR).CIDRs) }},
	} {
		t.Run(name, func(t *testing.T) {
			o, skips := c.convert(c.most)
			require.Equal(t, c.most, c.kept(o))
			require.Empty(t, skips)
			o, skips = c.convert(c.most + 3)
			require.Equal(t, c.most, c.kept(o))
			require.Len(t, skips, 1)
			require.Equal(t, TooMany, skips[0].Reason)
			require.Equal(t, c.field, skips[0].Field)
			require.Contains(t, skips[0].Detail, fmt.Sprint(c.most))
			require.True(t, skips[0].Invalid(), "it is logged")
		})
	}
}

// TestStringsAreBounded checks that invalid strings are left out.
func TestStringsAreBounded(t *testing.T) {
	slice := func(zone, node string) (model.Keyed, []Skip) {
		_, o, skips := NewConverter("").Convert(&discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Name: "s", Namespace: "default", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.1"}, Zone: &zone, NodeName: &node}},
		})
		return o, skips
	}
	zone, node := strings.Repeat("z", 63), strings.Repeat("n", 253)
	o, skips := slice(zone, node)
	require.Empty(t, skips)
	require.Equal(t, zone, o.(*model.Slice).Endpoints[0].Zone)
	require.Equal(t, node, o.(*model.Slice).Endpoints[0].NodeName)
	o, skips = slice(strings.Repeat("z", 1<<20), node)
	require.Equal(t, []Reason{InvalidText}, reasons(skips))
	require.Less(t, len(skips[0].Detail), 2*maxDetail)
	require.Empty(t, o.(*model.Slice).Endpoints[0].Zone)
	o, skips = slice(zone, node+"n")
	require.Equal(t, []Reason{InvalidText}, reasons(skips))
	require.Empty(t, o.(*model.Slice).Endpoints[0].NodeName)
}
