package apiserver

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"k8s.io/client-go/rest"
)

const (
	// cpuMetric and startMetric are metrics of every Go process that uses the Prometheus client.
	// cpuMetric is user and system CPU time together, and startMetric is the start time. Both are
	// in seconds.
	cpuMetric   = "process_cpu_seconds_total"
	startMetric = "process_start_time_seconds"
	// maxMetrics is the maximum size of metrics to read, in bytes; real ones are some MiB.
	// maxMetricsLine is the maximum length of a line.
	maxMetrics     = 256 << 20
	maxMetricsLine = 1 << 20
)

// Account is the CPU time of a process at a moment.
type Account struct {
	// Start identifies the process, in seconds since 1970, because another process may answer at
	// the same address.
	Start float64
	CPU   time.Duration
}

// ReadAccount reads the CPU time that an API server on another machine has used so far, from its
// metrics. That costs the API server CPU time, so it should be done rarely. If there are several
// API servers behind one address, any of them may answer. ReadAccount fails if the API server does
// not report its CPU time or denies access.
func ReadAccount(ctx context.Context, client rest.Interface) (a Account, err error) {
	// Without this header the API server would spend CPU time on compression.
	body, err := client.Get().AbsPath("/metrics").SetHeader("Accept-Encoding", "identity").Stream(ctx)
	if err != nil {
		return a, fmt.Errorf("read the metrics of the API server: %w", err)
	}
	defer body.Close()
	lines := bufio.NewScanner(io.LimitReader(body, maxMetrics))
	lines.Buffer(nil, maxMetricsLine)
	found := make(map[string]float64)
	for len(found) < 2 && lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), " ")
		if name != cpuMetric && name != startMetric {
			continue
		}
		if found[name], err = strconv.ParseFloat(value, 64); err != nil {
			return a, fmt.Errorf("read the metric %s of the API server: %w", name, err)
		}
	}
	_, cpu := found[cpuMetric]
	if _, start := found[startMetric]; !cpu || !start {
		return a, errors.Join(fmt.Errorf("the metrics of the API server lack %s or %s", cpuMetric, startMetric), lines.Err())
	}
	return Account{Start: found[startMetric], CPU: time.Duration(found[cpuMetric] * float64(time.Second))}, nil
}
