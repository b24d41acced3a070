package kubeproxy

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/slicecast/slicecast/internal/daemon"
)

// modeURL is where kube-proxy tells its mode and healthURL where it tells load balancers of its health, unless its configuration says
// otherwise: a container does not see the processes of others, but has the node's network. Our agent may tell its health there, too, and in
// the same words; readyURL is where only it answers.
const (
	modeURL   = "http://127.0.0.1:10249/proxyMode"
	healthURL = "http://127.0.0.1:10256/healthz"
	readyURL  = "http://127.0.0.1:10256/readyz"
)

// answerTimeout is for an answer of the same machine, and answerLimit how much is read of it, in bytes.
const (
	answerTimeout = 2 * time.Second
	answerLimit   = 1 << 10
)

// running tells where a kube-proxy runs that programs this network namespace; "": none was found.
func running(ctx context.Context) string {
	if processes := daemon.InNetwork("kube-proxy"); len(processes) > 0 {
		return "process " + filepath.Base(processes[0])
	}
	if _, mode := ask(ctx, modeURL); slices.Contains([]string{"iptables", "ipvs", "nftables"}, strings.TrimSpace(mode)) {
		return fmt.Sprintf("%s says that it is in mode %s", modeURL, mode)
	}
	if _, health := ask(ctx, healthURL); isHealth(health) {
		if status, _ := ask(ctx, readyURL); status == http.StatusNotFound {
			return healthURL + " answers as it does"
		}
	}
	return ""
}

// isHealth tells whether this is what kube-proxy says of its health.
func isHealth(body string) bool {
	var health struct{ LastUpdated, CurrentTime time.Time }
	return json.Unmarshal([]byte(body), &health) == nil && !health.CurrentTime.IsZero()
}

// ask gives what an URL of this machine answers; 0: there is no answer. Health that is bad has a status of its own.
func ask(ctx context.Context, url string) (status int, body string) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, ""
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(request)
	if err != nil {
		return 0, ""
	}
	defer response.Body.Close()
	b, err := io.ReadAll(io.LimitReader(response.Body, answerLimit))
	if err != nil {
		return 0, ""
	}
	return response.StatusCode, string(b)
}
