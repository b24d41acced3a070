// Package auth decides who may use the server, and as which node.
//
// Who a caller is comes from one of these:
//
//   - its TLS client certificate, verified against the client CA, with the names that Kubernetes gives: a kubelet's
//     certificate (organization system:nodes, common name system:node:<name>) is that node, and one of the organization
//     system:masters is an operator;
//   - a ServiceAccount token bound to a Pod, which the API server reviews and says the node of;
//   - the way it came: by the debug socket, which only the server's own user can open, or in plaintext, where the server
//     was told not to ask. Both are operators.
//
// A node may be itself and nothing else. An operator may be any node, and an observer. Everyone else is refused before any
// handler runs; what an authenticated caller may do beyond the streams (reflection, health, channelz) is the same for all.
// A stream goes on when its credentials expire; the next one needs new ones.
package auth
