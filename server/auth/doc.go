// Package auth decides who may use the server, and as what.
//
// Who a caller is comes from one of these:
//
//   - its TLS client certificate, verified against the client CA. Its organizations give it roles: system:nodes, with the
//     common name system:node:<name>, is that node, as in a kubelet's certificate; system:masters is an operator;
//     slicecast:relays is a relay, which the common name names; slicecast:observers is an observer;
//   - a ServiceAccount token that the API server reviews. That of an agent's ServiceAccount is bound to a Pod, whose node the
//     API server names; one of a relay's ServiceAccount is a relay;
//   - the way it came: by the debug socket, which only the server's own user can open, or in plaintext, where the server
//     was told not to ask. Both are operators.
//
// What each may do:
//
//	           | stream as       | stream as | stream as | health | reflection, channelz,
//	           | a node's agent  | observer  | relay     |        | /metrics, all else
//	node       | of that node    | no        | no        | yes    | no
//	relay      | no              | no        | yes       | yes    | no
//	observer   | no              | yes       | no        | yes    | yes
//	operator   | of any node     | yes       | yes       | yes    | yes
//
// Everyone else is refused before any handler runs. A stream ends when the credentials expire that it began with; the next
// one needs new ones. Every refusal is counted by its reason, and the first of a reason in each minute is logged.
//
// Strangers can't keep nodes out by showing invented tokens. A token is checked here first, by the
// keys that the API server publishes, and the API server is asked about those that pass. A
// compromised node may have many that pass, so each node and relay has its share of the reviews;
// those that have a Node share a budget that others can't touch.
package auth
