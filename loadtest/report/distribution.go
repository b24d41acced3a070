package report

import (
	"fmt"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// MaxDuration is the longest duration that a histogram can record. Longer durations are recorded as
// MaxDuration.
const MaxDuration = time.Hour

// significantDigits is the precision of histograms, in decimal digits.
const significantDigits = 3

// NewHistogram returns an empty histogram of microseconds, from 1 to MaxDuration.
func NewHistogram() *hdrhistogram.Histogram {
	return hdrhistogram.New(1, MaxDuration.Microseconds(), significantDigits)
}

// Pace is the time, in milliseconds, within which nodes that keep up with the changes have 99 % of
// the updates.
const Pace = 1000

// Distribution is a distribution of durations, in milliseconds. All fields are zero if there are no
// durations.
type Distribution struct {
	Count int64   `json:"count"`
	Mean  float64 `json:"meanMillis"`
	Min   float64 `json:"minMillis"`
	P50   float64 `json:"p50Millis"`
	P90   float64 `json:"p90Millis"`
	P99   float64 `json:"p99Millis"`
	P999  float64 `json:"p999Millis"`
	Max   float64 `json:"maxMillis"`
	// Histogram is the whole distribution in microseconds, in HdrHistogram's compressed format (V2)
	// and base64, as its tools read it. A distribution without it cannot be merged with others.
	Histogram string `json:"histogram,omitempty"`
}

// DistributionOf summarizes a histogram of microseconds. It does not retain the histogram.
func DistributionOf(h *hdrhistogram.Histogram) Distribution {
	if h.TotalCount() == 0 {
		return Distribution{}
	}
	d := Distribution{
		Count: h.TotalCount(), Mean: h.Mean() / 1000, Min: toMillis(h.Min()), P50: toMillis(h.ValueAtQuantile(50)),
		P90: toMillis(h.ValueAtQuantile(90)), P99: toMillis(h.ValueAtQuantile(99)), P999: toMillis(h.ValueAtQuantile(99.9)),
		Max: toMillis(h.Max()),
	}
	encoded, err := h.Encode(hdrhistogram.V2CompressedEncodingCookieBase)
	if err != nil {
		// Encoding writes only to memory.
		panic(fmt.Sprintf("a histogram in memory is not encoded: %v", err))
	}
	d.Histogram = string(encoded)
	return d
}

// Decode returns the histogram of microseconds that the distribution was made from. It fails if the
// distribution has none.
func (d Distribution) Decode() (*hdrhistogram.Histogram, error) {
	h, err := hdrhistogram.Decode([]byte(d.Histogram))
	if err != nil {
		return nil, fmt.Errorf("decode the histogram of a distribution: %w", err)
	}
	return h, nil
}

// Merge merges distributions. It fails if one that is not empty has no histogram.
func Merge(all ...Distribution) (Distribution, error) {
	merged := NewHistogram()
	for _, d := range all {
		if d.Count == 0 {
			continue
		}
		h, err := d.Decode()
		if err != nil {
			return Distribution{}, err
		}
		merged.Merge(h)
	}
	return DistributionOf(merged), nil
}

func toMillis(us int64) float64 { return float64(us) / 1000 }
