// Package chaos breaks a real cluster, one fault after the other, while its Services change and
// traffic passes through them. It counts the requests that are lost or reach a Pod that they should
// not reach any more, and measures how long the nodes take to converge after each fault. With the
// same seed, kube-proxy meets the same faults and changes as Slicecast.
//
// A [Plan] is drawn from a seed alone: when each fault happens and where, and when which object of
// the churn changes. [Run] carries it out in a cluster of testenv and returns a [Report].
package chaos
