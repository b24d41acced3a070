package ipvs

import (
	"testing"

	"github.com/slicecast/slicecast/internal/testenv/vm"
)

func TestMain(m *testing.M) { vm.Main(m) }
