package ipvs

import (
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/xtables"
)

// Serves reports whether a run of this programmer has left a table that serves an IP family.
func Serves(family model.Family) (bool, error) { return xtables.HasChain(family, Table, inputChain) }
