// This test proves that the CPU time and the start of an API server are read from its metrics, and
// that metrics that lack them are an error. The API server's answers are scripted.
package apiserver

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/client-go/kubernetes"
)

func TestProcess(t *testing.T) {
	said := func(what string) func(*answer) {
		return func(a *answer) {
			require.Equal(t, "identity", a.request.Header.Get("Accept-Encoding"))
			_, _ = a.Write([]byte("# HELP some_metric of another kind\nsome_metric 17\n" + what))
		}
	}
	a := newAPI(t, map[string][]func(*answer){"metrics": {
		said("process_cpu_seconds_total 12.25\nprocess_start_time_seconds 1.7e+09\n"),
		said("process_cpu_seconds_total 12.5\nprocess_start_time_seconds 1.7e+09\n"),
		said(""),
		said("process_cpu_seconds_total much\nprocess_start_time_seconds 1.7e+09\n"),
		func(a *answer) { http.Error(a, "no", http.StatusForbidden) },
	}})
	client, err := kubernetes.NewForConfig(a.config())
	require.NoError(t, err)
	api := client.CoreV1().RESTClient()
	before, err := ReadAccount(t.Context(), api)
	require.NoError(t, err)
	after, err := ReadAccount(t.Context(), api)
	require.NoError(t, err)
	require.Equal(t, before.Start, after.Start)
	require.Equal(t, 250*time.Millisecond, after.CPU-before.CPU)
	for _, wrong := range []string{"lack process_cpu_seconds_total", `parsing "much"`, "read the metrics of the API server: no"} {
		_, err = ReadAccount(t.Context(), api)
		require.ErrorContains(t, err, wrong)
	}
}
