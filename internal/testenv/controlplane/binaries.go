package controlplane

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/slicecast/slicecast/internal/testenv/repository"
)

// BinariesVariable is the name of an environment variable. Its value is a folder that contains etcd
// and the Kubernetes components, for machines that cannot build them.
const BinariesVariable = "SLICECAST_BINARIES"

// KubeProxyVariable is the name of an environment variable. Its value is the version of an earlier
// kube-proxy to test with, such as 1.36, which must have a folder in internal/testenv/kubernetes.
// If the variable is unset or empty, kube-proxy has the same version as the other components.
const KubeProxyVariable = "SLICECAST_KUBE_PROXY"

// KubernetesBinary returns the path of etcd, agnhost, kubectl or a component such as
// kube-apiserver, in the version that internal/testenv/kubernetes pins. Its first use on a machine
// builds the component, which takes minutes and is reported on standard error.
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

// Prepare builds the binaries that a control plane needs. Afterwards Start neither waits for a
// build nor fails for lack of a network.
func Prepare() error {
	ctx := context.Background()
	for _, component := range []string{"etcd", "kube-apiserver", "kube-controller-manager"} {
		if _, err := KubernetesBinary(ctx, component); err != nil {
			return err
		}
	}
	return nil
}

// script runs a script of this repository and returns the path that it prints.
func script(ctx context.Context, name string, args ...string) (string, error) {
	root, err := repository.Root()
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(root, name), args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s (see its output): %w", name, strings.Join(args, " "), err)
	}
	return strings.TrimSpace(string(out)), nil
}
