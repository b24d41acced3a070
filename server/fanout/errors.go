package fanout

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// These statuses refuse a stream before its client is admitted.
var (
	// errStopping arises if a stream begins while the server drains.
	errStopping = status.Error(codes.Unavailable, "the server is draining: use another one, or try again later")
	// errNotSynced arises if a stream begins before the source's state is published.
	errNotSynced = status.Error(codes.Unavailable, "the server has not synced with its source yet: try again in a moment")
	// errNoHello arises if a client is silent for helloTimeout.
	errNoHello = status.Errorf(codes.InvalidArgument, "no hello within %v", helloTimeout)
	// errNotHello arises if a client's first message is another one.
	errNotHello = status.Error(codes.InvalidArgument, "the first message must be hello")
	// errClosed arises if a client closes its side of the stream without a Hello.
	errClosed = status.Error(codes.InvalidArgument, "the stream ended before its hello")
	// errTooEarly arises if a message follows the Hello before the client is admitted.
	errTooEarly = status.Error(codes.InvalidArgument,
		"a message before welcome: hello is all that the server takes until then")
	// errNarrowRelay arises if a relay's Hello has a subscription.
	errNarrowRelay = status.Error(codes.InvalidArgument, "a relay wants everything: leave out the subscription")
)

// These statuses end a session.
var (
	// errDraining arises when the server drains, after the client was asked to leave.
	errDraining = status.Error(codes.Unavailable, "the server is draining: resume on another one")
	// errExpired arises when the credentials expire that the client was admitted with.
	errExpired = status.Error(codes.Unauthenticated,
		"the credentials that this stream began with have expired: open another one with fresh ones")
	// errNoUpstream arises for relays, on a relay whose own stream has ended or is not in sync yet.
	// Its Path may then change, and a path that is no longer true would hide a circle of relays that
	// feed each other.
	errNoUpstream = status.Error(codes.Unavailable, "this relay has no stream from its own server, "+
		"and does not feed others until it has one: use another server, or try again later")
)

// These statuses end the session of a client that breaks the protocol or exceeds a bound.
var (
	// errSecondHello arises if a Hello is not the first message.
	errSecondHello = status.Error(codes.InvalidArgument, "a second hello: open a new stream instead")
	// errSubscribingRelay arises if a relay changes its subscription.
	errSubscribingRelay = status.Error(codes.InvalidArgument, "a relay wants everything: it can't subscribe")
	// errLongName arises if a subscription has a name of more than maxName bytes.
	errLongName = status.Errorf(codes.InvalidArgument,
		"a subscription with a name of more than %d bytes, which Kubernetes does not allow", maxName)
	// errUnaskedDigests arises if a client sends Digests and no DigestQuery is open.
	errUnaskedDigests = status.Error(codes.InvalidArgument, "digests that nobody has asked for: leave them out")
	// errTooManyMessages arises if a client exceeds the rate of messages.
	errTooManyMessages = status.Errorf(codes.ResourceExhausted, "more than %d messages a second", messagesPerSecond)
	// errTooManyResyncs arises if a client exceeds the rate of resyncs, subscriptions and questions
	// for digests.
	errTooManyResyncs = status.Errorf(codes.ResourceExhausted, "more than %d resyncs, subscriptions and "+
		"questions for digests a second: resume on a new stream instead", resyncsPerSecond)
	// errTooManyWaiting arises if the client's unanswered Resyncs take more than maxWaiting.
	errTooManyWaiting = status.Error(codes.ResourceExhausted, "too many resyncs wait already: read what comes first")
)
