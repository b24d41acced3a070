// Package conformance plays cases of what a Service must do to real packets, and tells whether an agent does it. The cases
// are data: the format is in testdata/scenarios/README.md, and its types are here. They are played with a real API server,
// a real kernel and real packets between network namespaces; a rule is never looked at.
//
// # Running
//
//	go test ./internal/conformance                                          the reference (kube-proxy, nftables), and Slicecast in all it has
//	go test ./internal/conformance -run TestKubeProxy -conformance.kube-proxy=nftables,iptables-nft,iptables-legacy
//	go test ./internal/conformance -run TestSlicecast -conformance.slicecast=iptables-nft
//	go test ./internal/conformance -run 'TestKubeProxy/nftables/etp-local$' -v
//
// One way of working takes about two and a quarter minutes, of which 98 seconds are one case's pauses, and two ways go on
// at a time. Flags:
//
//	-conformance.dir          folder of cases; also others' in the same format
//	-conformance.kube-proxy   ways of kube-proxy to play them with: ipvs, nftables, iptables-nft, iptables-legacy
//	-conformance.slicecast    the same of Slicecast; all but ipvs, which most kernels lack, by default
//	-conformance.exceptions   what our programmers may do otherwise in these cases; empty for none
//
// With the environment variable SLICECAST_KUBE_PROXY=1.36, kube-proxy is the one before that of the pinned Kubernetes:
// make conformance KUBE_PROXY=1.36 plays the cases to it in its modes.
//
// On a machine without Go or a network, the compiled test (go test -c) runs in this package's folder with the environment
// variable SLICECAST_BINARIES naming a folder that holds etcd, kube-apiserver, kube-proxy, slicecast-server and slicecast-agent.
// internal/testenv/vm/oldkernel has it run in a virtual machine, with API servers on the host. It needs the commands conntrack,
// and nft or iptables as far as they are flushed. It needs root, or a kernel that lets others have user namespaces.
//
// # What is observed
//
// Flows are tried with crafted first packets (testenv.Wire), 40 and more for each flow and all flows of a step at once.
// Each must arrive at one of the expected backends, with the source that the case says, and what the backend answers must
// come back to the client from where the client sent to. Backends are exactly those that are reached.
//
//	REJECT  an ICMP port unreachable comes back or, for TCP, a reset that is no backend's
//	DROP    nothing is seen within 200 ms of the last sign of life of any flow
//	ACCEPT  the packet arrives where it was sent to, unchanged: past the node's rules for input, if that is the node
//
// After each step the runner waits for the agent by a canary: a Service whose port and endpoints change, twice, after all
// that the step has changed. What must not have happened is judged only when a later change has been seen. What is not as
// it must be then is tried again for some seconds, for what agents do beside rules, such as health checks; sessions and
// flows with a source port are tried once, unless their client goes on.
//
// # What is right
//
// kube-proxy must do what the case says of its mode: so the cases prove the runner. Slicecast must do the same in every
// mode: expectSlicecast where a case has it, else expectNftables, else expect; results under accept are tolerated.
// Where a programmer's kernel interface makes that impossible it may do what kube-proxy does in that mode, if testdata/exceptions.yaml says so, with the
// reason. An exception that is not needed fails the case.
//
// A file with an unknown field or value, or one that this runner can't play, is an error; nothing is skipped. Cases and
// steps with modes are for those programmers only.
package conformance
