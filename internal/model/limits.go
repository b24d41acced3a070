package model

// MaxFrontends bounds a Service's ports times its addresses, in each family. Nodes program no more, so that sources keep no more
// ports, and no more addresses or ranges of a list.
const MaxFrontends = 10_000
