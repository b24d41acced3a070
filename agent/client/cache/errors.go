package cache

import "errors"

// ErrProtocol arises when a server breaks the protocol: what it sent does not fit the cache, or
// exceeds a bound. The cache is as it was before. The client leaves the server for another one.
var ErrProtocol = errors.New("server broke the protocol")
