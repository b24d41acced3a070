package oldkernel

import (
	"testing"

	"github.com/slicecast/slicecast/internal/testenv/vm"
)

func TestOldKernel(t *testing.T) {
	vm.Test(t,
		vm.Suite{Dir: "internal/testenv", Flags: []string{"-test.run=^TestProbeSeesTranslation$|^TestHairpinNeedsMasquerade$"}},
	)
}
