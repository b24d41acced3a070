package connection

import "errors"

// These errors end a stream, as cache.ErrProtocol does.
var (
	// errNotReading arises when more requests wait for the server than may wait.
	errNotReading = errors.New("the server does not read what it is told, " +
		"or makes this client ask for more than servers take")
	// errSilent arises when the server has sent nothing for several heartbeat intervals.
	errSilent = errors.New("the server has been silent for too long")
	// errMove arises once the client is connected to a server that it prefers.
	errMove = errors.New("another server is preferred")
)
