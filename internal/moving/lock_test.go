// These tests prove that an agent that cannot program an IP family, because the xtables lock is
// held or programs are missing, makes its node unhealthy and leaves working rules in place. The
// Services have only IPv4, so the rules of IPv6 need no change.
package moving

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/internal/testenv"
)

// lockedProgrammer is a programmer whose programs take the xtables lock for each change.
const lockedProgrammer = "iptables-legacy"

// newIPv4World returns a world with two Services that have only IPv4, and with a manifest of the
// first one.
func newIPv4World(t *testing.T) (w *world, web, more service, feed []string) {
	t.Helper()
	w = newWorld(t)
	web, more = newService("web", 1, w.pods...), newService("more", 2, w.pods...)
	web.ClusterIPs, more.ClusterIPs = web.ClusterIPs[:1], more.ClusterIPs[:1]
	w.write(web)
	return w, web, more, []string{"--node-name=a", "--source=file", "--manifests=" + w.dir}
}

// TestLockThatIsHeld lets a program hold the xtables lock on a node of an IPv4-only cluster. The
// rules of IPv6, which has no Services, need no change. The node must become unhealthy, the agent
// must log this once, and rules that worked before must keep working.
func TestLockThatIsHeld(t *testing.T) {
	w, web, more, feed := newIPv4World(t)
	w.start(lockedProgrammer, feed...)
	w.requireServed(web, settleTimeout)
	complaints := func() int {
		return strings.Count(w.agent.Log(), "level=ERROR") + strings.Count(w.agent.Log(), "level=WARN")
	}
	before := complaints()
	release := holdLock(t)
	w.write(web, more)
	w.awaitHealth("/livez", http.StatusServiceUnavailable)
	require.Equal(t, http.StatusServiceUnavailable, w.health("/healthz"))
	w.requireServed(web, settleTimeout)
	require.Equal(t, 1, complaints()-before, w.agent.Log())
	require.Contains(t, w.agent.Log(), "nothing of IPv4 is programmed")
	release()
	w.awaitHealth("/livez", http.StatusOK)
	w.requireServed(more, settleTimeout)
}

// TestLockThatIsHeldFromTheStart is the same for an agent that starts on a node with the rules of
// another programmer. Those rules must stay, and the node must become unhealthy although this agent
// has never programmed it.
func TestLockThatIsHeldFromTheStart(t *testing.T) {
	w, web, _, feed := newIPv4World(t)
	w.start(lockedProgrammer, feed...)
	rules, err := w.node.Run(t.Context(), "ip6tables-legacy-save")
	require.NoError(t, err)
	require.NoError(t, w.agent.Stop())
	w.start("nftables", feed...)
	require.NoError(t, w.agent.Stop())
	// The rules of IPv6 are those that the agent wants, with their counters.
	for _, counter := range regexp.MustCompile(`--nfacct-name +(\S+)`).FindAllStringSubmatch(rules, -1) {
		require.NoError(t, w.node.Do(func() error {
			s, err := netlink.Open(unix.NETLINK_NETFILTER)
			if err != nil {
				return err
			}
			defer s.Close()
			return s.AddCounter(counter[1])
		}))
	}
	restore := w.node.Command(t.Context(), "ip6tables-legacy-restore")
	restore.Stdin = strings.NewReader(rules)
	require.NoError(t, restore.Run())

	release := holdLock(t)
	require.NoError(t, w.agent.Start([]string{agentVariable + "=1"}, "/proc/self/exe", append(agentFlags(lockedProgrammer), feed...)...))
	w.awaitHealth("/livez", http.StatusOK)
	w.awaitHealth("/livez", http.StatusServiceUnavailable)
	require.Equal(t, http.StatusServiceUnavailable, w.health("/healthz"))
	require.Equal(t, http.StatusServiceUnavailable, w.health("/readyz"))
	require.Contains(t, w.left(), "nftables")
	w.requireServed(web, settleTimeout)
	release()
	w.awaitHealth("/readyz", http.StatusOK)
	w.awaitHealth("/livez", http.StatusOK)
	require.Equal(t, []string{lockedProgrammer}, w.left())
	w.requireServed(web, settleTimeout)
}

// holdLock holds the lock of all iptables programs until the caller calls release or the test ends.
func holdLock(t *testing.T) (release func()) {
	t.Helper()
	lock, err := os.OpenFile("/run/xtables.lock", os.O_CREATE|os.O_RDWR, 0o600)
	require.NoError(t, err)
	require.NoError(t, unix.Flock(int(lock.Fd()), unix.LOCK_EX))
	t.Cleanup(func() { _ = lock.Close() })
	return func() { require.NoError(t, lock.Close()) }
}

// health returns the HTTP status of one of the agent's health checks; 0 means no answer.
func (w *world) health(path string) int {
	w.t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: w.node.DialContext}}
	r, err := client.Get("http://127.0.0.1:8475" + path)
	if err != nil {
		return 0
	}
	require.NoError(w.t, r.Body.Close())
	return r.StatusCode
}

// awaitHealth waits until a health check has the given HTTP status.
func (w *world) awaitHealth(path string, status int) {
	w.t.Helper()
	testenv.Eventually(w.t, settleTimeout, func() error {
		if is := w.health(path); is != status {
			return fmt.Errorf("%s has status %d, want %d", path, is, status)
		}
		return nil
	})
}

// TestPrimaryFamilyMissing starts an agent on a node that lacks the programs for its primary IP
// family. The node must not become ready, and the rules of another programmer must stay.
func TestPrimaryFamilyMissing(t *testing.T) {
	w, web, _, feed := newIPv4World(t)
	w.start("nftables", feed...)
	require.NoError(t, w.agent.Stop())
	programs := t.TempDir()
	for _, name := range []string{"ip6tables-legacy", "ip6tables-legacy-save", "ip6tables-legacy-restore"} {
		path, err := exec.LookPath(name)
		require.NoError(t, err)
		require.NoError(t, os.Symlink(path, filepath.Join(programs, name)))
	}
	require.NoError(t, w.agent.Start([]string{agentVariable + "=1", "PATH=" + programs}, "/proc/self/exe", append(agentFlags(lockedProgrammer), feed...)...))
	w.agent.AwaitLine(t, settleTimeout, "nothing of IPv4 is programmed: it is the node's primary IP family")
	require.Equal(t, http.StatusServiceUnavailable, w.health("/readyz"))
	w.awaitHealth("/livez", http.StatusServiceUnavailable)
	require.Contains(t, w.left(), "nftables")
	w.requireServed(web, settleTimeout)
}
