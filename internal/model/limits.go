package model

// MaxFrontends bounds the number of ports of a Service times the number of its addresses, in each
// IP family. Nodes program no more frontends than that, so sources keep no more ports, addresses or
// ranges in a list.
const MaxFrontends = 10_000
