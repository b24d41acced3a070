package testenv

import (
	"fmt"
	"net/netip"
)

// WebService is the cluster IP and the port of the Service in [WebManifest].
var WebService = netip.MustParseAddrPort("10.96.0.80:80")

// WebManifest returns a Service and its only endpoint, at port 8080 of an IPv4 address, as a
// manifest for agents and servers that read files.
func WebManifest(endpoint netip.Addr) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec: {clusterIP: %[1]s, clusterIPs: [%[1]s], ports: [{port: %[2]d}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [%[3]s]}]
`, WebService.Addr(), WebService.Port(), endpoint)
}
