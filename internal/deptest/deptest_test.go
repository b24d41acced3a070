// Package deptest holds the tree to its rooms: what must stay free of the network, Kubernetes
// clients and the kernel, so that it can be tested as input and output, imports none of them,
// not even through others.
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
		t.Run(room, func(t *testing.T) {
			out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", module+room).CombinedOutput()
			require.NoError(t, err, "%s", out)
			for _, dependency := range strings.Fields(string(out)) {
				for _, prefix := range forbidden {
					require.False(t, dependency == prefix || strings.HasPrefix(dependency, prefix+"/"),
						"%s must not depend on %s; 'go list -deps' from there shows the way", room, dependency)
				}
			}
		})
	}
}
