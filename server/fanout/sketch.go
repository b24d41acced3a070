package fanout

import (
	"math/bits"
	"time"
)

// The buckets of a sketch are sketchUnit wide up to 16 units (65 µs). Above that, a bucket is as
// wide as a sixteenth of the largest power of two units below it. The last bucket also has all
// times beyond sketchLimit.
const (
	sketchUnit    = 4096 * time.Nanosecond
	sketchLimit   = sketchUnit << 30 // 73 minutes
	sketchError   = 16               // a time is too large by at most 1/sketchError
	sketchBuckets = (30 - 4 + 1) * sketchError
)

// sketch holds how long nodes took, so that rank can return any order statistic. A statistic is
// never less than the true one. It is too large by at most a sixteenth, or by sketchUnit if that is
// more. Beyond sketchLimit it is the maximum. The maximum is exact.
//
// A sketch takes 4 bytes for each bucket of the powers of two between the shortest and the longest
// time. That is half a KiB for times from 1 to 100 ms, and 4 × sketchBuckets bytes at most.
type sketch struct {
	// counts has the number of nodes in each bucket from first on. Its length and first are
	// multiples of sketchError.
	counts []uint32
	first  int
	max    time.Duration
}

func bucket(t time.Duration) int {
	units := uint64(min(max(t, 0), sketchLimit-1) / sketchUnit)
	exponent := max(bits.Len64(units)-5, 0)
	return exponent*sketchError + int(units>>exponent)
}

// upperEdge returns the exclusive upper bound of a bucket other than the last.
func upperEdge(bucket int) time.Duration {
	exponent := max(bucket/sketchError-1, 0)
	return time.Duration(bucket-exponent*sketchError+1) << exponent * sketchUnit
}

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

// rank returns the time within which that many of the recorded nodes were done.
func (s *sketch) rank(nodes int) time.Duration {
	for i, n := range s.counts {
		if nodes -= int(n); nodes > 0 {
			continue
		}
		return s.edge(i)
	}
	return s.max
}

// edge returns the longest time of a bucket, by its index in counts.
func (s *sketch) edge(i int) time.Duration {
	if b := s.first + i; b < sketchBuckets-1 {
		return min(upperEdge(b), s.max)
	}
	return s.max
}

// steps returns how many nodes were done within each time at which the number grew.
func (s *sketch) steps() (out []Step) {
	done := 0
	for i, n := range s.counts {
		if n > 0 {
			done += int(n)
			out = append(out, Step{Time: s.edge(i), Nodes: done})
		}
	}
	return out
}
