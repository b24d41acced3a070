// Package oldkernel contains only tests. They run tests of other packages on the kernel of the
// virtual machine, which is older than most kernels that those tests run on otherwise, all in one
// boot.
package oldkernel
