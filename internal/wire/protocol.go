package wire

// Protocol is the ALPN protocol (RFC 7301) that agents offer in TLS before "h2". It also stands for
// HTTP/2 with gRPC. The name lets a server tell agents from other clients before their first byte.
const Protocol = "slicecast-h2"

// MaxRelayedNacks bounds the open Nacks that a relay passes on, and that a server stores for a
// relay.
const MaxRelayedNacks = 1024
