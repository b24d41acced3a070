//go:build race

// This file says that the tests run with the race detector.
package redact

const raceDetector = true
