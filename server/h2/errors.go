package h2

import (
	"errors"
	"fmt"

	"golang.org/x/net/http2"
)

// violation is a breach of the protocol that ends the client's connection.
type violation struct {
	code   http2.ErrCode
	reason string // it is also sent to the client
}

// Error implements error.
func (v violation) Error() string { return fmt.Sprintf("%s (%s)", v.reason, v.code) }

var (
	// errAlreadyEnded is for frames on a stream that the client has ended itself.
	errAlreadyEnded = violation{http2.ErrCodeStreamClosed, "the client has already ended the stream"}
	// errTooManyFrames is for a client that sends more frames than its budget allows, or than a
	// stranger may.
	errTooManyFrames = violation{http2.ErrCodeEnhanceYourCalm, "too many frames without a message"}
	// errBlockTooLong is for a header block of more than maxBlockFrames frames or too many bytes,
	// and errBlockTooSlow for one that is incomplete after maxBlockTime.
	errBlockTooLong = violation{http2.ErrCodeEnhanceYourCalm, "a header block is too long"}
	errBlockTooSlow = violation{http2.ErrCodeEnhanceYourCalm, "a header block takes too long to arrive"}
	// errTooManySettings is for a SETTINGS frame with more than maxSettings settings.
	errTooManySettings = violation{http2.ErrCodeEnhanceYourCalm, "too many settings in one frame"}
	// errTooManyPings is for a client that pings more often than Options.MinClientPing allows. Its
	// reason makes grpc-go's client ping less often.
	errTooManyPings = violation{http2.ErrCodeEnhanceYourCalm, "too_many_pings"}
)

// These errors end a connection, or its stream, without a breach of the protocol.
var (
	// errDrained ends a draining connection that has no stream.
	errDrained = errors.New("the connection is drained")
	// errDead is for a client that has not answered a ping within Options.PingTimeout.
	errDead = errors.New("the client does not answer pings")
	// errNotRead is for a client that does not read, so that maxPending bytes wait for it.
	errNotRead = errors.New("the client does not read the answers to its frames")
	// errUndelivered is for a client that sends maxUndelivered bytes from which TLS delivers
	// nothing.
	errUndelivered = fmt.Errorf("a TLS handshake or record is incomplete after %d bytes", maxUndelivered)
	// errStopped closes the connections of a stopped server.
	errStopped = errors.New("the server is stopped")
	// errServed is returned by sends after the session has returned.
	errServed = errors.New("the session has returned")
)
