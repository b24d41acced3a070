package wire

// Protocol is what agents offer in TLS (ALPN, RFC 7301) before "h2". What they speak then is HTTP/2 and gRPC all the same; the
// name lets a server tell agents' connections from others before the first byte.
const Protocol = "slicecast-h2"

// MaxRelayedNacks is how many open nacks a relay passes on, and a server remembers of a relay.
const MaxRelayedNacks = 1024
