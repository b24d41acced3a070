//go:build race

// This file says that the tests, and therefore the commands that they build, run under the race
// detector.
package e2e

const raceDetector = true
