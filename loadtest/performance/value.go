package performance

import (
	"fmt"
	"strings"

	"github.com/slicecast/slicecast/loadtest/report"
)

type value struct {
	report.Spread
	// share means that the value is a ratio of two figures.
	share bool
}

func single(unit report.Unit, v float64) value {
	return value{Spread: report.Spread{Unit: unit, Median: v, Min: v, Max: v}}
}

// String returns the figure, with the range of its repeats if they differ.
func (v value) String() string {
	switch {
	case !v.share && v.Unit == report.Number:
		return v.text(thousands)
	case !v.share:
		return v.Text()
	}
	return v.text(shareText)
}

func (v value) text(format func(float64) string) string {
	if format(v.Min) == format(v.Max) {
		return format(v.Median)
	}
	return fmt.Sprintf("%s (%s to %s)", format(v.Median), format(v.Min), format(v.Max))
}

func shareText(v float64) string {
	if v < 1 {
		return "1/" + thousands(1/v)
	}
	return thousands(v) + " times"
}

func thousands(v float64) string {
	whole, fraction, _ := strings.Cut(report.FormatValue(v, report.Number), ".")
	for i := len(whole) - 3; i > 0; i -= 3 {
		whole = whole[:i] + "," + whole[i:]
	}
	if fraction != "" {
		whole += "." + fraction
	}
	return whole
}

// minus returns the difference of the medians. Its range covers the differences of any repeat of
// one and any repeat of the others.
func (v value) minus(others ...value) (value, error) {
	for _, o := range others {
		if o.Unit != v.Unit {
			return value{}, fmt.Errorf("%q minus %q", v.Unit, o.Unit)
		}
		v = value{Spread: report.Spread{Unit: v.Unit, Median: v.Median - o.Median, Min: v.Min - o.Max, Max: v.Max - o.Min}}
	}
	return v, nil
}

func times(n float64, v value) value {
	return value{Spread: report.Spread{Unit: v.Unit, Median: n * v.Median, Min: n * v.Min, Max: n * v.Max}}
}

// ratio returns the ratio of the medians. Its range covers the ratios of any repeat of one to any
// repeat of the other.
func (v value) ratio(of value) (value, error) {
	if of.Min <= 0 {
		return value{}, fmt.Errorf("a ratio to %v, which may be 0", of)
	}
	return value{share: true, Spread: report.Spread{
		Unit: report.Number, Median: v.Median / of.Median, Min: v.Min / of.Max, Max: v.Max / of.Min,
	}}, nil
}

// judge returns a bound and a figure as texts. The second text says so if the figure does not keep
// the bound in all repeats.
func (v value) judge(bound string) (boundText, text string, err error) {
	b, err := report.ParseBound(bound, v.Unit)
	if err != nil {
		return "", "", err
	}
	boundText = b.Text
	if v.share {
		boundText = strings.Replace(boundText, report.FormatValue(b.Value, report.Number), shareText(b.Value), 1)
	}
	missed := 0
	for _, run := range v.Values {
		if !b.Keeps(run) {
			missed++
		}
	}
	switch {
	case b.Keeps(v.Max):
		return boundText, v.String(), nil
	case b.Keeps(v.Median) && missed > 0:
		return boundText, fmt.Sprintf("%s, **missed in %d of %d runs**", v, missed, len(v.Values)), nil
	}
	return boundText, v.String() + ", **missed**", nil
}

// bounded returns the table cells of a bound and of a figure.
func bounded(v value, bound string) (string, error) {
	boundText, text, err := v.judge(bound)
	return boundText + " | " + text, err
}
