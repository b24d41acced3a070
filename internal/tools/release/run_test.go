// These tests start the images' programs with the images' files as their root, on a node with a
// pod. Each agent image programs a Service so that connections reach the pod, and cleans up after
// itself.
package main

import (
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/command"
)

// patience bounds the time of a single step on a slow machine.
const patience = time.Minute

// rootOf returns a folder with the files of an image for this machine, and with /proc and /dev.
func rootOf(t *testing.T, name string) string {
	t.Helper()
	require.Contains(t, architectures, runtime.GOARCH)
	img, err := tarball.ImageFromPath(filepath.Join(firstBuild, name+"-"+runtime.GOARCH+".tar"), nil)
	require.NoError(t, err)
	root := extract(t, img)
	for _, name := range []string{"/proc", "/dev"} {
		require.NoError(t, unix.Mount(name, root+name, "", unix.MS_BIND|unix.MS_REC, ""))
		t.Cleanup(func() { require.NoError(t, unix.Unmount(root+name, unix.MNT_DETACH)) })
	}
	return root
}

func TestAgentImages(t *testing.T) {
	for _, test := range []struct {
		name, image string
		flags       []string
	}{
		{"nftables", "slicecast-agent", []string{"--programmer=nftables"}},
		{"iptables-nft", "slicecast-agent-iptables", []string{"--programmer=iptables", "--iptables-variant=nft"}},
		{"iptables-legacy", "slicecast-agent-iptables", []string{"--programmer=iptables", "--iptables-variant=legacy"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			network := testenv.NewNetwork(t)
			node := network.AddNode("node")
			server, client := node.AddPod("server"), node.AddPod("client")
			server.Serve(testenv.TCP, 8080)
			root := rootOf(t, test.image)
			require.NoError(t, os.Mkdir(filepath.Join(root, "manifests"), 0o755))
			require.NoError(t, os.WriteFile(filepath.Join(root, "manifests/web.yaml"), []byte(testenv.WebManifest(server.IPv4)), 0o600))

			agent := command.New(t, node.Host, test.image)
			flags := slices.Concat([]string{
				root, "slicecast-agent", "--node-name=node", "--source=file", "--manifests=/manifests",
				"--healthz-bind-address=127.0.0.1:8475", "--programmer-fallback=false", "--status-socket=/run/agent.sock",
				"--cluster-cidr=" + node.PodCIDR4.String(),
			}, test.flags)
			require.NoError(t, agent.Start(nil, "chroot", flags...))
			agent.AwaitOK(t, patience, "http://127.0.0.1:8475/readyz")
			result := client.Probe(t.Context(), testenv.TCP, testenv.WebService, 3, testenv.ProbeOptions{})
			require.Equal(t, map[string]int{"server": 3}, result.Backends(), result)
			status, err := node.Run(t.Context(), "chroot", root, "slicecast-agent", "status", "--status-socket=/run/agent.sock")
			require.NoError(t, err)
			require.Contains(t, status, "version "+testRelease.version)
			require.NoError(t, agent.Stop())

			_, err = node.Run(t.Context(), "chroot", root, "slicecast-agent", "cleanup")
			require.NoError(t, err)
			result = client.Probe(t.Context(), testenv.TCP, testenv.WebService, 1, testenv.ProbeOptions{})
			require.Empty(t, result.Backends(), result)
		})
	}
}

// TestServerImage starts the server of its image.
func TestServerImage(t *testing.T) {
	network := testenv.NewNetwork(t)
	version, err := network.World.Run(t.Context(), "chroot", rootOf(t, "slicecast-server"), "slicecast-server", "--version")
	require.NoError(t, err)
	require.Contains(t, version, "slicecast-server "+testRelease.version+"\ncommit: "+testRelease.revision+"\n")
}
