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
// node's network. Slicecast's agent may serve its health at healthURL, too, in the same format.
// Only the agent answers at readyURL.
const (
	modeURL   = "http://127.0.0.1:10249/proxyMode"
	healthURL = "http://127.0.0.1:10256/healthz"
	readyURL  = "http://127.0.0.1:10256/readyz"
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
	if _, mode := ask(ctx, modeURL); slices.Contains([]string{"iptables", "ipvs", "nftables"}, strings.TrimSpace(mode)) {
		return fmt.Sprintf("%s reports the mode %s", modeURL, strings.TrimSpace(mode))
	}
	if _, health := ask(ctx, healthURL); isHealth(health) {
		if status, _ := ask(ctx, readyURL); status == http.StatusNotFound {
			return healthURL + " answers like kube-proxy"
		}
	}
	return ""
}

// isHealth reports whether body has the format of kube-proxy's health.
func isHealth(body string) bool {
	var health struct{ LastUpdated, CurrentTime time.Time }
	return json.Unmarshal([]byte(body), &health) == nil && !health.CurrentTime.IsZero()
}

// ask returns what a URL of this machine answers. status is 0 if there is no answer. An unhealthy
// kube-proxy answers with another status than a healthy one, but with the same format.
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
