package ipvs

import (
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/internal/model"
)

// Serves reports whether a run of this programmer has left a table that serves an IP family.
func Serves(family model.Family) (bool, error) { return nft.HasChain(family, Table, inputChain) }
