package wire

import (
	"errors"
	"fmt"

	"github.com/slicecast/slicecast/internal/model"
)

// Errors of frames that are not decoded at all. Each continues a sentence about the frame.
var (
	errSeveral  = errors.New("it has several messages")
	errObjects  = fmt.Errorf("it has several objects, in more than %d bytes", maxSeveral)
	errFields   = fmt.Errorf("it has an object of more than %d fields", maxFields)
	errProblems = fmt.Errorf("more than %d of its objects do not decode", maxProblems)
	errBuckets  = fmt.Errorf("it names more than %d buckets", model.Buckets)
	errNested   = errors.New("a compressed frame inside of a compressed one")

	// errGeneral leaves an update to the general decoder.
	errGeneral = errors.New("it holds more than deltas without new endpoints")
)
