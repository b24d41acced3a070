// This file runs the commands of deploy/README.md that install, start, upgrade and remove the
// units, exactly as they are there. Only make is left out, because the programs are built already.
package systemd

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv/repository"
)

// source is a folder of the machine with what the commands need.
const source = "/tmp/slicecast"

// commands runs the block of commands in deploy/README.md that has this name.
func (m *machine) commands(t *testing.T, name string) string {
	t.Helper()
	block, err := repository.Commands("deploy/README.md", name)
	require.NoError(t, err)
	out, err := m.run(t.Context(), "sh", "-e", "-c", "cd "+source+"\n"+strings.Replace(block, "make build\n", "", 1))
	require.NoError(t, err, "%s: %s", name, out)
	return out
}

// reinstall removes both units, which run, and installs them again.
func (m *machine) reinstall(t *testing.T, reached func()) {
	shell := func(script string) string {
		t.Helper()
		out, err := m.run(t.Context(), "sh", "-e", "-c", script)
		require.NoError(t, err, out)
		return out
	}
	shell(`mkdir -p ` + source + `/bin
		cp /usr/local/bin/slicecast-* ` + source + `/bin
		cp /etc/slicecast/*.crt /etc/slicecast/*.key /etc/slicecast-server/tls.* ` + source + `
		cp ` + source + `/agent.crt ` + source + `/relay.crt; cp ` + source + `/agent.key ` + source + `/relay.key
		cp /etc/slicecast/agent.yaml /etc/slicecast-server/server.yaml ` + source + `
		cp -r /etc/slicecast-server/manifests ` + source + `
		mkdir -p /etc/sysusers.d; cp ` + source + `/deploy/systemd/slicecast-server.sysusers /etc/sysusers.d/slicecast-server.conf`)

	m.commands(t, "agent-uninstall")
	m.commands(t, "server-uninstall")
	require.Empty(t, shell(`find /etc /var/lib /usr/local /run -name "*slicecast*" -not -path "/run/slicecast-systemd*"`))
	require.Empty(t, shell("nft list ruleset | grep -i slicecast || true; iptables-legacy-save | grep -i slicecast || true"))
	require.NotContains(t, shell("cat /etc/passwd"), "slicecast")

	m.commands(t, "server-install")
	shell(`cat ` + source + `/server.yaml >/etc/slicecast-server/server.yaml; cp -r ` + source + `/manifests /etc/slicecast-server
		chown -R slicecast-server /etc/slicecast-server/manifests`)
	require.Contains(t, m.commands(t, "server-start"), "1 Services, 1 slices, 1 endpoints")
	m.commands(t, "agent-install")
	shell(`cat ` + source + `/agent.yaml >/etc/slicecast/agent.yaml`)
	require.Contains(t, m.commands(t, "agent-start"), "1 Service ports, programmed")
	reached()
	before := m.main(t, agentUnit)
	m.commands(t, "agent-upgrade")
	m.awaitReady(t, agentUnit)
	require.NotEqual(t, before, m.main(t, agentUnit))
	reached()
	for _, unit := range []string{agentUnit, serverUnit} {
		out, err := m.systemctl(t.Context(), "is-enabled", unit)
		require.NoError(t, err)
		require.Equal(t, "enabled\n", out)
	}
}
