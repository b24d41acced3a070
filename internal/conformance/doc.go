// Package conformance
package conformance
