// Package daemon is what every long-running command of Slicecast does in the same way: it logs, ends on signals, tells
// whether it is healthy, shows metrics, listens on a socket for its own user, and says its version.
package daemon
