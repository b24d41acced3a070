//go:build !race

// This file says that the tests run without the race detector.
package redact

const raceDetector = false
