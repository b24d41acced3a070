// Package oldkernel has tests only: other packages' tests, run on the kernel of the virtual machine, which is older than
// most kernels that they run on otherwise, and all in one boot.
package oldkernel
