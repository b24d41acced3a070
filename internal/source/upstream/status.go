package upstream

import "github.com/slicecast/slicecast/agent/client"

// Connection tells how the relay stands with its servers.
func (u *Source) Connection() client.Connection { return u.client.Connection() }
