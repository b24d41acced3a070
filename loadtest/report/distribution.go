package report

import (
	"fmt"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// MaxDuration is the most that histograms can tell; what took longer counts as this.
const MaxDuration = time.Hour

// significantDigits of what a histogram tells.
const significantDigits = 3

// NewHistogram makes a histogram of microseconds, from 1 to MaxDuration.
func NewHistogram() *hdrhistogram.Histogram {
	return hdrhistogram.New(1, MaxDuration.Microseconds(), significantDigits)
}

// Pace is, in milliseconds, how soon nodes that keep pace with changes have 99 % of the updates.
const Pace = 1000

// Distribution of durations, in milliseconds; all zero if there are none.
type Distribution struct {
	Count int64   `json:"count"`
	Mean  float64 `json:"meanMillis"`
	Min   float64 `json:"minMillis"`
	P50   float64 `json:"p50Millis"`
	P90   float64 `json:"p90Millis"`
	P99   float64 `json:"p99Millis"`
	P999  float64 `json:"p999Millis"`
	Max   float64 `json:"maxMillis"`
	// Histogram holds all of it, in microseconds: HdrHistogram's compressed form (V2), in base64, as its tools read it. Without
	// it the distribution cannot be merged with others.
	Histogram string `json:"histogram,omitempty"`
}

// DistributionOf reads a histogram of microseconds. The histogram stays the caller's.
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
		panic(fmt.Sprintf("a histogram in memory is not encoded: %v", err)) // no writer in it can fail
	}
	d.Histogram = string(encoded)
	return d
}

// Decode gives the histogram of microseconds that a distribution was read from. It fails if there is none.
func (d Distribution) Decode() (*hdrhistogram.Histogram, error) {
	h, err := hdrhistogram.Decode([]byte(d.Histogram))
	if err != nil {
		return nil, fmt.Errorf("histogram of a distribution: %w", err)
	}
	return h, nil
}

// Merge joins distributions that have their histograms, or are empty.
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
