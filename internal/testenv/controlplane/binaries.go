package controlplane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// BinariesVariable is an environment variable. It names a folder that has etcd and the Kubernetes components ready, for
// machines where they can't be built.
const BinariesVariable = "SLICECAST_BINARIES"

// KubeProxyVariable is an environment variable. It is the version of an earlier kube-proxy to test
// with, one that has a folder in internal/testenv/kubernetes, such as 1.36. If it is unset or
// empty, kube-proxy has the version that the other components have.
const KubeProxyVariable = "SLICECAST_KUBE_PROXY"

// KubernetesBinary returns the path of etcd, kube-apiserver, kube-controller-manager or kube-proxy,
// as pinned in internal/testenv/kubernetes. The first use on a machine builds it, which takes
// minutes and says so on standard error.
func KubernetesBinary(ctx context.Context, component string) (string, error) {
	if dir := os.Getenv(BinariesVariable); dir != "" {
		return filepath.Join(dir, component), nil
	}
	args := []string{component}
	if version := os.Getenv(KubeProxyVariable); version != "" && component == "kube-proxy" {
		args = append(args, version)
	}
	return script(ctx, "internal/testenv/kubernetes/build.sh", args...)
}

// Prepare gets the binaries that a control plane needs, so that Start does not wait for them or, without a network, fail.
func Prepare() error {
	ctx := context.Background()
	for _, component := range []string{"etcd", "kube-apiserver", "kube-controller-manager"} {
		if _, err := KubernetesBinary(ctx, component); err != nil {
			return err
		}
	}
	return nil
}

// script runs a script of this repository that prints a path.
func script(ctx context.Context, name string, args ...string) (string, error) {
	root, err := repositoryRoot()
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(root, name), args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s (its own output says more): %w", name, strings.Join(args, " "), err)
	}
	return strings.TrimSpace(string(out)), nil
}

// repositoryRoot finds the root module's folder above the working directory, which for a test is
// its package's folder.
func repositoryRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		goMod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && bytes.HasPrefix(goMod, []byte("module github.com/slicecast/slicecast\n")) {
			return dir, nil
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return "", err
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("the working directory is not inside the slicecast repository: run there")
		}
		dir = parent
	}
}
