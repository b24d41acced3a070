// This file asks an installation with kubectl slicecast, through the kubelets of its pods.
package e2e

import (
	"bytes"
	"fmt"
	"strings"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/plugin"
	"github.com/slicecast/slicecast/internal/testenv"
)

// requirePlugin requires that kubectl slicecast reaches all servers and agents, and that all
// nodes are connected and nothing is wrong.
func (i install) requirePlugin() {
	i.Helper()
	for command, shows := range map[string]string{
		"status": "serving", "nodes node-1 node-2": "2 nodes\n", "lacks default/kubernetes": "0 nodes lack it",
		"changes": "", "check -o wide": "kernel",
		"agent node-1 node-2": "nftables: ", "agent node-2 -o json": `"nodeName": "node-2"`,
	} {
		testenv.Eventually(i.T, patience, func() error {
			var out bytes.Buffer
			c := plugin.NewCommand()
			c.SetOut(&out)
			c.SetErr(&out)
			c.SetArgs(append([]string{"--kubeconfig=" + i.Kubeconfig}, strings.Fields(command)...))
			_, err := daemon.Execute(i.Context(), c)
			if code := plugin.Code(c, err); code != 0 || !strings.Contains(out.String(), shows) {
				return fmt.Errorf("kubectl slicecast %s: exit code %d\n%s", command, code, &out)
			}
			i.Logf("kubectl slicecast %s: %d bytes", command, out.Len())
			return nil
		})
	}
}
