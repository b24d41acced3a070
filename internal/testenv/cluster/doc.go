// Package cluster runs a real Kubernetes cluster on one machine: etcd, the API server with all
// controllers, a scheduler, CoreDNS, and nodes, each with its containerd and kubelet. Everything is
// dual-stack, and nodes are in zones. Pods run in real containers of real images.
//
// A program calls [Isolate] first, and a test package from its TestMain. They need root.
//
//	func TestMain(m *testing.M) { cluster.Main(m) }
//
//	c, err := cluster.Start(ctx, cluster.Options{Nodes: 3, Proxy: cluster.KubeProxy})
//	defer c.Stop()
//	c.Client.CoreV1().Pods("default").Create(...)
//
// # Nodes
//
// A node is a node of [testenv.Network] with a process 1 of its own, in new mount, PID, UTS and IPC
// namespaces. It sees the machine's files, but what it writes is on a disk of its own, which
// outlives a reboot. A pod has a link of its own to its node (the CNI plugin ptp). Addresses and
// routes are those of testenv.
//
// # What is left
//
// All processes are in the PID namespace of the program, and all mounts and files in its mount
// namespace, so the kernel removes them when the program ends for any reason. The cgroups and the
// folder that is visible outside are removed by the watcher, a process that [Isolate] starts
// outside these namespaces. If the watcher is killed as well, the next program that calls Isolate
// removes them.
//
// A process can run one cluster at a time. Clusters of several processes share nothing.
package cluster
