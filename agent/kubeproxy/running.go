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

// These URLs are where kube-proxy runs by default: modeURL returns its mode, and healthURL its
// health. They are needed because a container does not see the processes of others, but shares the
// node's network. Slicecast's agent may serve the same there, in the same format; see
// daemon.AgentServer.
const (
	modeURL   = "http://127.0.0.1:10249/proxyMode"
	healthURL = "http://127.0.0.1:10256/healthz"
)

// answerTimeout bounds the time to wait for an answer from this machine, and answerLimit how many
// bytes of it are read.
const (
	answerTimeout = 2 * time.Second
	answerLimit   = 1 << 10
)

// Running describes a kube-proxy that programs this network namespace, or returns "" if it finds
// none.
func Running(ctx context.Context) string {
	if processes := daemon.InNetwork("kube-proxy"); len(processes) > 0 {
		return "process " + filepath.Base(processes[0])
	}
	mode := strings.TrimSpace(ask(ctx, modeURL))
	if slices.Contains([]string{"iptables", "ipvs", "nftables"}, mode) {
		return fmt.Sprintf("%s reports the mode %s", modeURL, mode)
	}
	if isHealth(ask(ctx, healthURL)) {
		return healthURL + " answers like kube-proxy"
	}
	return ""
}

// isHealth reports whether body has the format of kube-proxy's health.
func isHealth(body string) bool {
	var health struct{ LastUpdated, CurrentTime time.Time }
	return json.Unmarshal([]byte(body), &health) == nil && !health.CurrentTime.IsZero()
}

// ask returns what a URL of this machine answers, and "" if there is no answer or if it is an
// agent's. An unhealthy kube-proxy answers with another status than a healthy one, but with the
// same format.
func ask(ctx context.Context, url string) (body string) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return ""
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(request)
	if err != nil {
		return ""
	}
	defer response.Body.Close()
	if response.Header.Get("Server") == daemon.AgentServer {
		return ""
	}
	b, err := io.ReadAll(io.LimitReader(response.Body, answerLimit))
	if err != nil {
		return ""
	}
	return string(b)
}
