package connection

import "errors"

// These errors end a stream, as cache.ErrProtocol does.
var (
	// errNotReading arises when more requests wait for the server than may wait.
	errNotReading = errors.New("server does not read requests, or causes more requests than it accepts")
	// errSilent arises when the server has sent nothing for several heartbeat intervals.
	errSilent = errors.New("server has been silent for too long")
	// errMove arises once the client is connected to a server that it prefers.
	errMove = errors.New("another server is preferred")
)
