package fanout

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// These statuses end a stream in more than one place.
var (
	// errDraining arises when the server drains, after the client was asked to leave.
	errDraining = status.Error(codes.Unavailable, "the server is draining: resume on another server")
	// errNoUpstream arises for relays, on a relay whose own stream has ended or is not in sync yet.
	// Its Path may then change, and a path that is no longer true would hide a circle of relays that
	// feed each other.
	errNoUpstream = status.Error(codes.Unavailable, "this relay has no stream from its own server and cannot feed "+
		"other relays: use another server, or try again later")
	errTooManyResyncs = status.Errorf(codes.ResourceExhausted, "more than %d resyncs and digest queries "+
		"per second: open a new stream instead", resyncsPerSecond)
)

func invalid(format string, args ...any) error {
	return status.Errorf(codes.InvalidArgument, format, args...)
}
