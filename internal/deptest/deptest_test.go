// Package deptest tests dependencies between packages. Pure packages, which tests can treat as
// functions of their input, import neither the network, nor Kubernetes clients, nor the kernel, not
// even indirectly. The programs do not depend on packages that would make them large.
package deptest

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const module = "github.com/slicecast/slicecast/"

// pure lists the packages that must not depend on any of forbidden.
var pure = []string{"internal/model", "internal/store", "agent/view"}

var forbidden = []string{
	"google.golang.org/grpc",
	"k8s.io/client-go",
	"github.com/vishvananda/netlink",
	"github.com/vishvananda/netns",
	"github.com/coreos/go-iptables",
	"github.com/fsnotify/fsnotify",
	"net/http",
	"os/exec",
}

func TestPurePackages(t *testing.T) {
	for _, room := range pure {
		t.Run(room, func(t *testing.T) { requireFree(t, room, forbidden...) })
	}
}

// TestSmallPrograms requires the programs not to depend on client-go's clientset. It includes all
// kinds of objects of Kubernetes, which would take memory on every node.
func TestSmallPrograms(t *testing.T) {
	for _, program := range []string{"agent", "server"} {
		t.Run(program, func(t *testing.T) { requireFree(t, program, "k8s.io/client-go/kubernetes", "k8s.io/api/apps") })
	}
}

func requireFree(t *testing.T, of string, forbidden ...string) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", module+of).CombinedOutput()
	require.NoError(t, err, "%s", out)
	for _, dependency := range strings.Fields(string(out)) {
		for _, prefix := range forbidden {
			require.False(t, dependency == prefix || strings.HasPrefix(dependency, prefix+"/"),
				"%s must not depend on %s; 'go list -deps' shows the path", of, dependency)
		}
	}
}
