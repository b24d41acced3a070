// Package conformance plays cases: each says what a Service must do to packets, and the package
// checks whether an agent does it. The cases are data. testdata/scenarios/README.md describes their
// format, and this package has the types for it. They are played with a real API server, a real
// kernel and real packets between network namespaces. What is right is never read from rules. After
// each step, the rules are also compared with the objects as "slicecast-agent verify" does. It must
// find no difference where packets find none.
//
// # Running
//
//	go test ./internal/conformance
//	go test ./internal/conformance -run TestKubeProxy -conformance.kube-proxy=nftables,iptables-nft
//	go test ./internal/conformance -run TestSlicecast -conformance.slicecast=iptables-nft
//	go test ./internal/conformance -run 'TestKubeProxy/nftables/etp-local$' -v
//
// The first command tests the reference, kube-proxy in mode nftables, and Slicecast in all
// variants.
//
// A variant takes about two and a quarter minutes, of which 98 seconds are the pauses of one case.
// Two variants run at the same time. Flags:
//
//	-conformance.dir          folder of the cases; may be another folder in the same format
//	-conformance.kube-proxy   variants of kube-proxy: ipvs, nftables, iptables-nft, iptables-legacy
//	-conformance.broken       variants of kube-proxy whose rules are broken
//	-conformance.slicecast    variants of Slicecast; default: all but ipvs, which most kernels lack
//	-conformance.record       folder for kube-proxy's outcomes with known bugs, or - to print them;
//	                          see the package bugs
//	-conformance.patience     factor of the bounds of what agents may take, for slow machines
//	-conformance.exceptions   where Slicecast's programmers may deviate; empty for nowhere
//
// With the environment variable SLICECAST_KUBE_PROXY=1.36, kube-proxy has the version before that
// of the pinned Kubernetes. "make conformance KUBE_PROXY=1.36" plays the cases with this kube-proxy
// in its modes.
//
// On a machine without Go or a network, run the compiled test (go test -c) in the folder of this
// package. The environment variable SLICECAST_BINARIES must name a folder with etcd,
// kube-apiserver, kube-proxy, slicecast-server and slicecast-agent. internal/testenv/vm/oldkernel
// runs the test in a virtual machine, with API servers on the host. The test needs the command
// conntrack, and nft or iptables if it flushes their rules. It needs root, or a kernel that allows
// user namespaces to other users.
//
// # What is observed
//
// Flows are tried with crafted first packets (a wire), 40 or more for each flow, and all
// flows of a step at once. Each packet must arrive at one of the expected backends with the source
// that the case says. The backend's answer must come back to the client from the address to which
// the client sent the packet. The packets of a flow must reach all of its backends.
//
//	REJECT  an ICMP port unreachable comes back or, for TCP, a reset not sent by a backend
//	DROP    nothing is seen of any flow for 200 ms
//	ACCEPT  the packet arrives unchanged at its destination; on the node, after its rules for input
//
// After each step the runner waits for the agent with a canary: a Service whose port and endpoints
// change twice after all changes of the step. It therefore judges only once a later change is
// programmed, so that it also sees what must not happen. If a check fails, it is repeated for some
// seconds, because agents do some work after programming rules, such as health checks. Sessions are
// tried once. Flows with a source port are tried once, unless their client goes on.
//
// # What is right
//
// kube-proxy must do what the case says for its mode, which proves that the runner is right.
// Slicecast must do the same in every mode: expectSlicecast if the case has it, otherwise
// expectNftables if the case has it, otherwise expect. Results under accept are tolerated. If a
// programmer's kernel interface makes that impossible, it may do what kube-proxy does in that mode,
// but only if testdata/exceptions.yaml says so and gives the reason. An exception that is not
// needed fails the case.
//
// A file with an unknown field or value, or that this runner cannot play, is an error. Nothing is
// skipped. Cases and steps with modes apply to those modes only.
package conformance
