// Package vm runs tests on another kernel: Debian's, in a virtual machine. It is there for what the kernel of the machine
// at hand may lack, such as IPVS, and to see what an older kernel makes of our rules. A test package says
//
//	func TestMain(m *testing.M) { vm.Main(m) }
//
// and all of its tests run inside, as [testenv.Main] has them; "go test" with its flags shows what they say as of any
// other test. [Test] is for a test on the host that has other packages' tests run inside, all in one boot.
//
// # The machine
//
// qemu emulates it (TCG), as machines for tests seldom lend their own virtualization. It boots in a few seconds, and runs
// Go some ten times slower than its host. It has two processors and no disk: its file system is the host's, read only, under a
// layer of memory that keeps what is written until the end. It has no network but for the ports of the host that a Suite
// names. So tests find their binaries, tools, test data and caches where they are on the host; only /proc, /sys, /dev and
// /run are its own. Modules are loaded when the
// kernel or a modprobe asks for them.
//
// Its processors take turns. When qemu 7.2 emulated both at the same time, the kernel was once found stuck: both trapped for ever
// at a jump in ip_local_deliver that it patches when the first hook is registered there, though the memory had the new code. A
// processor that is stuck for two minutes ends the machine.
//
// Binaries for it are built anew, without the race detector (which would make emulated programs several times slower
// still; run the same code's other tests under it) and without cgo. Files that test flags ask for, such as profiles, stay
// inside and are lost; the flags are left out.
//
// # What it needs
//
// qemu-system-x86_64 on the PATH, the go command, and the kernel: internal/tools/kernel.sh has apt-get download Debian's
// package, unpacks it to the cache and installs nothing. internal/tools/setup.sh gets both.
package vm
