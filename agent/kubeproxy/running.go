package kubeproxy

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// modeURL is where kube-proxy tells its mode, unless its configuration says otherwise: a container does not see the processes
// of others, but has the node's network.
const modeURL = "http://127.0.0.1:10249/proxyMode"

// answerTimeout is for an answer of the same machine.
const answerTimeout = 2 * time.Second

// running tells where a kube-proxy runs that programs this network namespace; "": none was found.
func running(ctx context.Context) string {
	own, err := os.Stat("/proc/thread-self/ns/net")
	commands, _ := filepath.Glob("/proc/[0-9]*/comm") // the pattern is a good one
	for _, path := range commands {
		comm, readErr := os.ReadFile(path)
		if err != nil || readErr != nil || string(bytes.TrimSpace(comm)) != "kube-proxy" {
			continue
		}
		process := filepath.Dir(path)
		if its, err := os.Stat(filepath.Join(process, "ns/net")); err == nil && os.SameFile(own, its) {
			return "process " + filepath.Base(process)
		}
	}
	if mode := askedMode(ctx); mode != "" {
		return fmt.Sprintf("%s says that it is in mode %s", modeURL, mode)
	}
	return ""
}

// askedMode gives what a kube-proxy says of its mode; "": none answers.
func askedMode(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, modeURL, nil)
	if err != nil {
		return ""
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(request)
	if err != nil {
		return ""
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, 100))
	mode := strings.TrimSpace(string(body))
	if err != nil || response.StatusCode != http.StatusOK || !slices.Contains([]string{"iptables", "ipvs", "nftables"}, mode) {
		return "" // somebody else's
	}
	return mode
}
