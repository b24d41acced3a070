// Package vm runs tests on another kernel: that of Debian, in a virtual machine. It is for features
// that the machine's own kernel may lack, such as IPVS, and for testing rules on an older kernel.
// If a test package contains
//
//	func TestMain(m *testing.M) { vm.Main(m) }
//
// all of its tests run in the virtual machine, isolated as by [testenv.Main]. "go test" with its
// flags shows their output like that of any other test. [Test] is for a test on the host that runs
// the tests of other packages in the machine, all in one boot.
//
// # The machine
//
// qemu emulates the machine (TCG), because machines that run tests rarely support nested
// virtualization. The machine boots in a few seconds and runs Go about ten times slower than the
// host. It has two processors and no disk. Its file system is that of the host, mounted read-only
// below a layer in memory that holds all changes until the end. Tests therefore find their
// binaries, tools, test data and caches at the same paths as on the host. Only /proc, /sys, /dev
// and /run are the machine's own. It has no network except for the ports of the host that a Suite
// names. It loads kernel modules when the kernel or a modprobe asks for them.
//
// The emulator runs the two processors alternately in one thread. With qemu 7.2 and a thread for
// each, the kernel once hung: both processors trapped forever at a jump in ip_local_deliver, which
// the kernel patches when the first hook is registered there, although the memory contained the new
// code. The kernel panics if a processor hangs for two minutes, which ends the machine.
//
// Binaries for the machine are built without cgo and without the race detector, which would make
// emulated programs several times slower again. The race detector must run the same code in other
// tests. Flags that ask for files, such as profiles, are removed, because the files would be lost
// inside.
//
// # What it needs
//
// qemu-system-x86_64 in the PATH, the go command, and the kernel. internal/tools/kernel.sh lets
// apt-get download Debian's kernel package and unpacks it into the cache, without installing
// anything. internal/tools/setup.sh provides both.
package vm
