package fanout

import (
	"math/bits"
	"time"
)

// The buckets of a sketch are as wide as sketchUnit up to 16 units (65 µs), and from there on a sixteenth of the power of two
// below them. The last bucket also has everything beyond sketchLimit.
const (
	sketchUnit    = 4096 * time.Nanosecond
	sketchLimit   = sketchUnit << 30 // 73 minutes
	sketchError   = 16               // a time is at most one sketchError-th too large
	sketchBuckets = (30 - 4 + 1) * sketchError
)

// sketch holds how long nodes took, so that rank can return any of their order statistics. A statistic is never less than the
// true one. It is larger by at most a sixteenth, or sketchUnit where that is more; beyond sketchLimit it is the maximum. The
// maximum is exact.
//
// It takes 4 bytes for each bucket of the powers of two between the shortest and the longest time: half a KiB for 1 to 100 ms,
// and 4 × sketchBuckets bytes at most.
type sketch struct {
	// counts are the nodes in each bucket from first on; its length and first are multiples of sketchError.
	counts []uint32
	first  int
	max    time.Duration
}

// bucket returns the number of the bucket that a time is in.
func bucket(t time.Duration) int {
	units := uint64(min(max(t, 0), sketchLimit-1) / sketchUnit)
	exponent := max(bits.Len64(units)-5, 0)
	return exponent*sketchError + int(units>>exponent)
}

// upperEdge returns the time that no time in a bucket but the last one reaches.
func upperEdge(bucket int) time.Duration {
	exponent := max(bucket/sketchError-1, 0)
	return time.Duration(bucket-exponent*sketchError+1) << exponent * sketchUnit
}

// add notes that so many nodes took so long.
func (s *sketch) add(t time.Duration, nodes int) {
	b := bucket(t)
	from := b - b%sketchError
	to := from + sketchError
	if len(s.counts) > 0 {
		from, to = min(from, s.first), max(to, s.first+len(s.counts))
	}
	if to-from > len(s.counts) {
		counts := make([]uint32, to-from)
		if len(s.counts) > 0 {
			copy(counts[s.first-from:], s.counts)
		}
		s.counts, s.first = counts, from
	}
	s.counts[b-s.first] += uint32(nodes)
	s.max = max(s.max, t)
}

// rank returns the time within which that many nodes were done, of those that were added.
func (s *sketch) rank(nodes int) time.Duration {
	for i, n := range s.counts {
		if nodes -= int(n); nodes > 0 {
			continue
		}
		if b := s.first + i; b < sketchBuckets-1 {
			return min(upperEdge(b), s.max)
		}
		break
	}
	return s.max
}
