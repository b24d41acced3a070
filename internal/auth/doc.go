// Package auth decides who may use the server, and in which role. It also decides who may read an
// agent's metrics.
//
// A caller's identity comes from one of these:
//
//   - Its TLS client certificate, verified against the client CA. The certificate's organizations
//     give it roles. system:nodes, with the common name system:node:<name>, is that node, as in a
//     kubelet's certificate. system:masters is an operator. slicecast:relays is a relay, which the
//     common name identifies. slicecast:observers is an observer.
//   - A ServiceAccount token that the API server reviews. The token of an agent's ServiceAccount is
//     bound to a Pod, whose node the API server names. The token of a relay's ServiceAccount is a
//     relay. An agent has a list of ServiceAccounts that are observers, and refuses the tokens of
//     all others by itself. At a server, any other ServiceAccount is an observer for the requests
//     that the API server allows it, by RBAC for their paths: a call of gRPC is a POST request for
//     the path of its method.
//   - The listener. The debug socket can only be opened by the server's own user. A plaintext
//     listener was configured to ask for no credentials. Callers on either are operators.
//
// The roles may do this:
//
//	           | stream as       | stream as | stream as | health | reflection, channelz,
//	           | a node's agent  | observer  | relay     |        | /metrics, all else
//	node       | of that node    | no        | no        | yes    | no
//	relay      | no              | no        | yes       | yes    | no
//	observer   | no              | yes       | no        | yes    | yes
//	operator   | of any node     | yes       | yes       | yes    | yes
//
// Everyone else is refused before any handler runs. A stream ends when the credentials expire that
// it began with; the next stream needs new ones. Each refusal is counted by its reason. The first
// refusal of a reason in each minute is logged.
//
// Strangers with invented tokens cannot keep nodes out. The server first checks a token by itself,
// with the keys that the API server publishes. It only asks the API server about tokens that pass.
// A compromised node may have many such tokens, so each node and relay has its own share of the
// reviews. Nodes whose Node exists have a budget that other callers cannot use up. Whoever may
// create Pods can have valid tokens of other ServiceAccounts, so these have a budget of their own,
// of which each namespace has a share.
package auth
