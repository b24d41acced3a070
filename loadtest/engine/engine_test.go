// These tests prove how the engine schedules plans, notes what distorts a measurement, reports
// failed repeats and refuses runs beyond its limits.
package engine

import (
	"errors"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/slicecast/slicecast/loadtest/generate"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/scenario"
	"github.com/slicecast/slicecast/loadtest/usage"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newRepeat returns a repeat of a scenario that is not played.
func newRepeat(s scenario.Scenario) *repeat {
	r := &repeat{options: &Options{}, scenario: &s, report: &report.Report{}, stack: &stack{options: &Options{}, scenario: &s, cluster: &generate.Config{}}}
	r.report.Machine.CPUs = 2
	r.meter = newMeter(r.stack, time.Now())
	return r
}

func TestPlansAreMeasuredFromTheirStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRepeat(scenario.Scenario{})
		for _, lead := range []time.Duration{6 * time.Second, -time.Second} {
			begin := time.Now()
			start := begin.Add(lead)
			got, err := r.meter.readFor(t.Context(), start)
			require.NoError(t, err)
			require.Equal(t, start, got.at)
			require.Equal(t, max(0, lead-readAhead), time.Since(begin), "the reading starts too early or too late")
		}
	})
}

func TestNotesAreAboutWhatIsMeasured(t *testing.T) {
	const behind = "more than 1 % of the updates took longer than a second: nodes did not keep up with the changes"
	cold := report.Phase{Name: "cold sync", Kind: report.ColdSync, Seconds: 10, ServerCPU: &report.CPU{System: 4}, ClientCPU: report.CPU{User: 12}}
	restart, changes := cold, cold
	restart.Name, restart.Kind, restart.Updates = "restart", report.Resync, 100
	changes.Name, changes.Kind, changes.Updates, changes.Reconnects = "changes", report.Changes, 500, 102

	r := newRepeat(scenario.Scenario{Change: generate.None, Event: scenario.Restart})
	r.add(cold, 19*time.Second)
	r.add(restart, 19*time.Second)
	require.Len(t, r.result.Phases, 2)
	require.Equal(t, []string{
		"the machine was 95 % busy during the cold sync: latencies include waiting for a CPU",
		"the load tester itself used more than half of the machine during the cold sync: it may cause part of the latencies",
		"other processes used 0.30 cores during the cold sync",
		"the machine was 95 % busy during the restart: latencies include waiting for a CPU",
		"the load tester itself used more than half of the machine during the restart: it may cause part of the latencies",
		"other processes used 0.30 cores during the restart",
	}, r.result.Notes)

	r = newRepeat(scenario.Scenario{Change: generate.Flip, Event: scenario.Restart})
	r.add(cold, 19*time.Second)
	r.add(restart, 19*time.Second)
	require.Empty(t, r.result.Notes)
	changes.ClientCPU.User, changes.ServerCPU = 1, &report.CPU{User: 0.5}
	changes.Aside = &report.Aside{Seconds: 2, Updates: 200}
	r.add(changes, 2*time.Second)
	require.Equal(t, []string{
		"the server used less than 1 s of CPU time during the changes: its division into user mode and kernel is imprecise, because the " +
			"kernel counts in steps of 10 ms",
		"bytes and CPU per node-update leave out the 2.00 s of the restart, in which nodes received 200 of the 500 updates",
	}, r.result.Notes)
	require.EqualValues(t, 2, r.result.Phases[2].Reconnects, "100 of the reconnects were due to the restart")
	changes.Changes, changes.Latency.P99, changes.ServerCPU = 5, 1001, nil
	r.add(changes, 2*time.Second)
	require.NotContains(t, r.result.Notes, behind, "a phase with a restart is not judged")
	changes.Aside = nil
	r.add(changes, 2*time.Second)
	require.Contains(t, r.result.Notes, behind)
	r.reconnected(105)
	require.EqualValues(t, 5, r.result.Reconnects)
	require.Contains(t, r.result.Notes, "5 streams broke and were reopened")
}

func TestFailedRepeatsAreReported(t *testing.T) {
	timeout := errors.New("not within a minute")
	r := newRepeat(scenario.Scenario{Nodes: 3})
	require.Equal(t, timeout, r.failed(timeout))
	require.Equal(t, []report.Repeat{{Check: report.Check{Nodes: 3, Error: "not within a minute"}}}, r.report.Repeats)
	require.False(t, r.report.OK())
}

func TestLimits(t *testing.T) {
	own := &Options{Peer: report.Slicecast}
	api := &Options{Peer: report.KubeAPIServer, KubeAPIServer: Own}
	for _, c := range []struct {
		options *Options
		s       scenario.Scenario
		ok      bool
	}{
		{own, scenario.Scenario{Nodes: 28_232, Servers: 1}, true},
		{own, scenario.Scenario{Nodes: 28_233, Servers: 1}, false},
		{own, scenario.Scenario{Nodes: 40_000, Servers: 1, Relays: 2}, true},
		{own, scenario.Scenario{Nodes: 50_000, Servers: 1, Relays: 2}, false},
		{own, scenario.Scenario{Nodes: 40_000, Servers: 2, Event: scenario.Failover}, false},
		{own, scenario.Scenario{Nodes: 20_000, Servers: 1, Event: scenario.Restart}, true},
		{&Options{Peer: report.Slicecast, Server: "x:1"}, scenario.Scenario{Nodes: 30_000, Servers: 3}, false},
		{api, scenario.Scenario{Nodes: 30_000, Servers: 1}, false},
	} {
		err := limits(c.options, &c.s, usage.Machine{Ports: 28_232, OpenFiles: math.MaxInt64})
		require.Equal(t, c.ok, err == nil, "%+v: %v", c.s, err)
		if err != nil {
			require.Contains(t, err.Error(), "the machine has only 28232 local ports")
		}
	}
	for addresses := 1; addresses < 5; addresses++ {
		byFiles, byPorts := Fit(addresses, 20_000, 28_232)
		require.LessOrEqual(t, share(byFiles, addresses), 20_000-spareFiles)
		require.Greater(t, share(byFiles+2*addresses, addresses), 20_000-spareFiles)
		require.LessOrEqual(t, share(byPorts, addresses), 28_232)
		require.Greater(t, share(byPorts+2*addresses, addresses), 28_232)
	}
	files := usage.Machine{Ports: math.MaxInt64, OpenFiles: 20_000}
	require.NoError(t, limits(api, &scenario.Scenario{Nodes: 20_000 - apiServerFiles}, files))
	err := limits(api, &scenario.Scenario{Nodes: 20_000}, files)
	require.ErrorContains(t, err, "the API server needs 20256 open files for 20000 nodes, but the limit is 20000")
	elsewhere := &Options{Peer: report.KubeAPIServer, KubeAPIServer: "kubeconfig"}
	require.NoError(t, limits(elsewhere, &scenario.Scenario{Nodes: 30_000}, files), "the limit of another machine is unknown")

	machine, err := usage.ThisMachine()
	require.NoError(t, err)
	err = limits(own, &scenario.Scenario{Nodes: 1_000_000, Servers: 1}, machine)
	require.Error(t, err)
	require.True(t, strings.HasPrefix(err.Error(), "1000000 nodes connect to one address"), err)
	require.NoError(t, limits(own, &scenario.Scenario{Nodes: 100, Servers: 1}, machine))
}
