// These tests prove that each change of a warning is logged and reported once, that the metric and
// the list follow, and that nothing is left unnoticed for a minute. The checks are fakes.
package warnings

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

func TestWarnings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const pods, proxy = pb.NodeWarning_NODE_WARNING_POD_RANGE_IPV4, pb.NodeWarning_NODE_WARNING_KUBE_PROXY
		var log bytes.Buffer
		var told []string
		type check = func(context.Context) map[pb.NodeWarning]string
		var now atomic.Pointer[check]
		find := func(found map[pb.NodeWarning]string) {
			now.Store(new(func(context.Context) map[pb.NodeWarning]string { return found }))
		}
		find(map[pb.NodeWarning]string{pods: "outside"})
		w := New(Options{
			Check:  func(ctx context.Context) map[pb.NodeWarning]string { return (*now.Load())(ctx) },
			Report: func(k pb.NodeWarning, reason string) { told = append(told, fmt.Sprint(k.Number(), " ", reason)) },
			Logger: slog.New(slog.NewTextHandler(&log, nil)),
		})
		metric := func(name string) float64 { return testutil.ToFloat64(w.metric.WithLabelValues(name)) }
		list := func() (out []string) {
			for _, x := range w.List() {
				out = append(out, fmt.Sprint(x.GetWarning().Number(), " ", x.GetReason(), " ", x.GetTime().AsTime().Unix()))
			}
			return out
		}
		pass := func(d time.Duration) {
			<-time.After(d)
			synctest.Wait()
		}
		ctx, cancel := context.WithCancel(t.Context())
		start := time.Now()
		go w.Run(ctx)
		synctest.Wait()
		require.Equal(t, []string{fmt.Sprint("1 outside ", start.Unix())}, list())
		require.Equal(t, []float64{1, 0, 0}, []float64{metric("pod_range_ipv4"), metric("pod_range_ipv6"), metric("kube_proxy")})

		pass(time.Hour) // nothing changes
		require.Equal(t, []string{"1 outside"}, told)
		require.Equal(t, 1, strings.Count(log.String(), "level=WARN"))

		find(map[pb.NodeWarning]string{pods: "still outside", proxy: "it runs"})
		changed := time.Now()
		pass(time.Minute)
		require.ElementsMatch(t, []string{"1 still outside", "3 it runs"}, told[1:])
		require.Equal(t, fmt.Sprint("1 still outside ", start.Unix()), list()[0], "it has lasted since then")
		require.WithinDuration(t, changed, w.List()[1].GetTime().AsTime(), interval)
		require.EqualValues(t, 1, metric("kube_proxy"))

		find(map[pb.NodeWarning]string{proxy: "it runs"})
		pass(time.Minute)
		require.Equal(t, "1 ", told[len(told)-1])
		require.Len(t, told, 4)
		require.Len(t, list(), 1)
		require.Zero(t, metric("pod_range_ipv4"))
		require.Equal(t, 1, strings.Count(log.String(), "A warning is over"))

		// A check that is cut short ends nothing.
		now.Store(new(func(context.Context) map[pb.NodeWarning]string { cancel(); return nil }))
		pass(time.Minute)
		require.Len(t, list(), 1)
		require.Len(t, told, 4)
	})
}
