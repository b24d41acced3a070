// Package daemon is what every long-running command of Slicecast does in the same way: it says where to read on about its command line, logs, ends on signals, tells
// whether it is healthy, shows metrics, listens on a socket for its own user, and says its version.
package daemon
