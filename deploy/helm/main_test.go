// This file starts the API server that all tests of the chart share, and runs Helm.
package helm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"

	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

const chart = "slicecast"

var cluster *controlplane.ControlPlane

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(controlplane.Around(m, controlplane.Options{Controllers: true}, &cluster))
}

// helmPath returns the path of Helm in the version that internal/tools/helm pins.
var helmPath = sync.OnceValues(func() (string, error) {
	cmd := exec.CommandContext(context.Background(), "../../internal/tools/helm.sh", "--path")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	return strings.TrimSpace(string(out)), err
})

// helm runs Helm without any settings of this machine, and returns what it prints.
func helm(t *testing.T, args ...string) (string, error) {
	t.Helper()
	path, err := helmPath()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), path, args...)
	home := t.TempDir()
	cmd.Env = []string{"HOME=" + home, "KUBECONFIG=" + filepath.Join(home, "none"), "PATH=" + os.Getenv("PATH")}
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("helm %s: %w: %s", strings.Join(args, " "), err, stderr.String())
	}
	return out.String(), nil
}

// required are the values that cannot be looked up without a cluster.
var required = []string{"--set=apiServer=api.example.com:6443", "--set=podCIDRs={10.244.0.0/16,fd00:10:244::/56}"}

// render renders the chart without a cluster, with the required values and others.
func render(t *testing.T, flags ...string) []*unstructured.Unstructured {
	t.Helper()
	args := append([]string{"template", "slicecast", chart, "--namespace=kube-system"}, required...)
	out, err := helm(t, append(args, flags...)...)
	require.NoError(t, err)
	return decode(t, out)
}

// decode returns the objects in a text of Helm.
func decode(t *testing.T, text string) []*unstructured.Unstructured {
	t.Helper()
	var objects []*unstructured.Unstructured
	for documents := utilyaml.NewYAMLOrJSONDecoder(strings.NewReader(text), 4096); ; {
		o := &unstructured.Unstructured{}
		err := documents.Decode(o)
		if errors.Is(err, io.EOF) {
			return objects
		}
		require.NoError(t, err, text)
		if len(o.Object) > 0 {
			objects = append(objects, o)
		}
	}
}

// find returns the object of a kind, a namespace and a name.
func find(t *testing.T, objects []*unstructured.Unstructured, kind, namespace, name string) *unstructured.Unstructured {
	t.Helper()
	for _, o := range objects {
		if o.GetKind() == kind && o.GetNamespace() == namespace && o.GetName() == name {
			return o
		}
	}
	require.Fail(t, "missing", "%s %s/%s", kind, namespace, name)
	return nil
}
