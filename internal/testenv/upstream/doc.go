// Package upstream runs Kubernetes' own end-to-end tests of Services and the network in a cluster
// of [cluster], whose proxy is Slicecast or kube-proxy. The tests are unchanged: e2e.test is built
// from the version of Kubernetes that the cluster runs, and ginkgo runs it as a client outside of
// the cluster.
//
// This package adds what upstream's clusters have and [cluster] does not: the images of the tests,
// and a load balancer. It also reads the tests' JUnit report, keeps the outcomes in the folder
// results, and makes docs/conformance.md from them.
//
// cases.yaml lists the cases that cannot run here, and explains those that fail with every proxy.
// No case is in it because it fails with Slicecast.
package upstream
