// Package deptest holds the tree to its rooms: what must stay free of the network, Kubernetes
// clients and the kernel, so that it can be tested as input and output, imports none of them,
// not even through others; and what runs on nodes stays small.
package deptest

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const module = "github.com/slicecast/slicecast/"

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

func TestPureRooms(t *testing.T) {
	for _, room := range pure {
		t.Run(room, func(t *testing.T) { requireFree(t, room, forbidden...) })
	}
}

// TestSmallPrograms: client-go's clientset has all kinds that there are, of which a node would hold a copy in memory.
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
				"%s must not depend on %s; 'go list -deps' from there shows the way", of, dependency)
		}
	}
}
