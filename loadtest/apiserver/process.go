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

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const (
	// cpuMetric and startMetric are those of every Go process with Prometheus' client: CPU time, user and system in one, and when
	// it was started, both in seconds.
	cpuMetric   = "process_cpu_seconds_total"
	startMetric = "process_start_time_seconds"
	// maxMetrics bounds what is read of an API server's metrics, which are some MiB, and maxMetricsLine one line of them.
	maxMetrics     = 256 << 20
	maxMetricsLine = 1 << 20
)

// Process is an API server as it tells of itself in its metrics, where it cannot be looked at. Reading them is work for it, so it
// should be seldom. Of several API servers behind one address it is the one that answers.
type Process struct{ client rest.Interface }

// Account is what a Process had used at a moment.
type Account struct {
	// Start tells the process from others, which may answer at the same address.
	Start float64
	CPU   time.Duration
}

// NewProcess makes a Process; it asks for nothing yet.
func NewProcess(config *rest.Config) (*Process, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	return &Process{client.CoreV1().RESTClient()}, nil
}

// Account reads what the process has used so far. Errors say that it does not tell, or not to everyone.
func (p *Process) Account(ctx context.Context) (a Account, err error) {
	// It would compress what it sends, which is work, too.
	body, err := p.client.Get().AbsPath("/metrics").SetHeader("Accept-Encoding", "identity").Stream(ctx)
	if err != nil {
		return a, fmt.Errorf("metrics of the API server: %w", err)
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
			return a, fmt.Errorf("metrics of the API server: %s: %w", name, err)
		}
	}
	_, cpu := found[cpuMetric]
	if _, start := found[startMetric]; !cpu || !start {
		return a, errors.Join(fmt.Errorf("metrics of the API server have no %s and %s", cpuMetric, startMetric), lines.Err())
	}
	return Account{Start: found[startMetric], CPU: time.Duration(found[cpuMetric] * float64(time.Second))}, nil
}
