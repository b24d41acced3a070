// Package daemon has what all long-running commands of Slicecast have in common: errors of the
// command line, logging, signals, health checks, metrics, a unix socket for the command's own user,
// and the version (--version).
package daemon
