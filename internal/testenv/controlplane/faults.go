package controlplane

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// etcdTimeout bounds a request to etcd.
const etcdTimeout = 30 * time.Second

// StopAPI kills the API server, and then the controllers and the scheduler. Real clusters run these
// two with leader election, so they end by themselves when they cannot renew their leases.
// Controllers that lived through the outage would take all nodes for dead, because no node has
// renewed its lease meanwhile.
func (cp *ControlPlane) StopAPI() error { return cp.kill(cp.clients()) }

// StartAPI starts what StopAPI has killed, and waits until it is ready.
func (cp *ControlPlane) StartAPI(ctx context.Context) error { return startAll(ctx, cp.clients()) }

// clients returns the components that depend on etcd, each after those that it depends on.
func (cp *ControlPlane) clients() []*Process {
	all := slices.Clone(cp.processes())
	slices.Reverse(all)
	return slices.DeleteFunc(all, func(p *Process) bool { return p == cp.Etcd })
}

func (cp *ControlPlane) kill(processes []*Process) error {
	var errs []error
	for _, p := range processes {
		errs = append(errs, p.Kill())
	}
	return errors.Join(errs...)
}

func startAll(ctx context.Context, processes []*Process) error {
	for _, p := range processes {
		if err := p.Start(ctx); err != nil {
			return err
		}
	}
	return nil
}

// CompactEtcd makes etcd forget all revisions before the latest one. Watches from the past then
// expire.
func (cp *ControlPlane) CompactEtcd(ctx context.Context) error {
	var status struct {
		Header struct {
			Revision string `json:"revision"`
		} `json:"header"`
	}
	if err := cp.etcd(ctx, "/v3/maintenance/status", map[string]any{}, &status); err != nil {
		return err
	}
	return cp.etcd(ctx, "/v3/kv/compaction", map[string]any{"revision": status.Header.Revision, "physical": true}, nil)
}

// etcd sends a request to etcd's JSON gateway.
func (cp *ControlPlane) etcd(ctx context.Context, path string, body, answer any) error {
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	content, err := json.Marshal(body)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, cp.etcdURL+path, bytes.NewReader(content))
	if err != nil {
		return err
	}
	response, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(request)
	if err != nil {
		return fmt.Errorf("etcd: %w", err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return fmt.Errorf("etcd: %s: %w", path, err)
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("etcd: %s: %s: %s", path, response.Status, strings.TrimSpace(string(text)))
	}
	if answer == nil {
		return nil
	}
	return json.Unmarshal(text, answer)
}

// BackUpEtcd copies etcd's data while etcd is paused, like a snapshot of its disk, and returns the
// folder of the copy. The copy is removed with the control plane.
func (cp *ControlPlane) BackUpEtcd(ctx context.Context) (backup string, err error) {
	if backup, err = os.MkdirTemp(cp.dir, "backup-"); err != nil {
		return "", err
	}
	if err := cp.Etcd.Pause(); err != nil {
		return "", err
	}
	out, err := exec.CommandContext(ctx, "cp", "-a", cp.etcdData(), backup).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("copy etcd's data: %w\n%s", err, out)
	}
	return backup, errors.Join(err, cp.Etcd.Resume())
}

// RestoreEtcd replaces etcd's data by that of BackUpEtcd, as etcd's documentation says: with the
// API server and the controllers stopped. It waits until all components are ready again.
func (cp *ControlPlane) RestoreEtcd(ctx context.Context, backup string) error {
	all := append([]*Process{cp.Etcd}, cp.clients()...)
	running := slices.DeleteFunc(slices.Clone(all), func(p *Process) bool { return !p.Running() })
	slices.Reverse(running)
	if err := cp.kill(running); err != nil {
		return err
	}
	err := errors.Join(
		os.RemoveAll(cp.etcdData()),
		os.Rename(filepath.Join(backup, filepath.Base(cp.etcdData())), cp.etcdData()),
		os.Remove(backup),
	)
	if err != nil {
		return err
	}
	return startAll(ctx, all)
}

func (cp *ControlPlane) etcdData() string { return filepath.Join(cp.dir, "etcd") }
