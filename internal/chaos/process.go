package chaos

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/cluster"
)

// process is a process on a node.
type process struct {
	node *cluster.Node
	pid  int // as this program sees it
}

// String returns a description such as "process 812 on node-1".
func (p process) String() string { return fmt.Sprintf("process %d on %s", p.pid, p.node.Name) }

// The beginnings of command lines, with a blank after each argument.
const (
	agentCommand     = "/usr/local/bin/slicecast-agent --config=/run/slicecast/config/agent.yaml --node-name="
	kubeProxyCommand = "/usr/local/bin/kube-proxy "
	serverCommand    = "/usr/local/bin/slicecast-server "
)

// processes returns the processes of nodes whose command lines begin with a text, in the order of
// the nodes. A process belongs to the node whose cgroup it is in.
func (r *run) processes(nodes []*cluster.Node, command string) ([]process, error) {
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return nil, err
	}
	var found []process
	for _, node := range nodes {
		group := "/" + filepath.Base(r.Dir) + "/" + node.Name + "/"
		for _, path := range lines {
			line, err := os.ReadFile(path)
			if err != nil || !strings.HasPrefix(string(bytes.ReplaceAll(line, []byte{0}, []byte{' '})), command) {
				continue // another one, or one that has ended
			}
			groups, err := os.ReadFile(filepath.Join(filepath.Dir(path), "cgroup"))
			if err != nil || !strings.Contains(string(groups), group) {
				continue
			}
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			if err != nil {
				return nil, err
			}
			found = append(found, process{node, pid})
		}
	}
	return found, nil
}

// awaitProcesses is processes once there are at least so many.
func (r *run) awaitProcesses(ctx context.Context, nodes []*cluster.Node, command string, atLeast int) (found []process, err error) {
	ctx, cancel := context.WithTimeout(ctx, convergeLimit)
	defer cancel()
	return found, testenv.WaitFor(ctx, func() error {
		if found, err = r.processes(nodes, command); err == nil && len(found) < atLeast {
			err = fmt.Errorf("%d processes run of %s", len(found), command)
		}
		return err
	})
}

func (p process) signal(signal syscall.Signal) error {
	if err := syscall.Kill(p.pid, signal); err != nil {
		return fmt.Errorf("send %s to %s: %w", signal, p, err)
	}
	return nil
}

// running reports whether the process exists and is no zombie.
func (p process) running() bool {
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.pid))
	return err == nil && len(line) > 0
}

// kill kills the process, and returns once it is gone.
func (p process) kill(ctx context.Context) error {
	if err := p.signal(syscall.SIGKILL); err != nil {
		return err
	}
	return p.awaitEnd(ctx)
}

// endPatience bounds the time in which a process ends.
const endPatience = 30 * time.Second

func (p process) awaitEnd(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, endPatience)
	defer cancel()
	return testenv.WaitFor(ctx, func() error {
		if p.running() {
			return fmt.Errorf("%s still runs", p)
		}
		return nil
	})
}

// limitFiles lowers the number of files that the process may open to what it has open, and returns
// a function that raises it again. It sets the soft limit, which needs no privilege to raise, as
// the user of the process.
func (p process) limitFiles(ctx context.Context) (func() error, error) {
	open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.pid))
	if err != nil {
		return nil, err
	}
	limits, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", p.pid))
	if err != nil {
		return nil, err
	}
	_, soft, ok := strings.Cut(string(limits), "Max open files")
	if !ok {
		return nil, fmt.Errorf("%s has no limit of open files", p)
	}
	before := strings.Fields(soft)[0]
	return func() error {
			if !p.running() {
				return nil
			}
			return p.prlimit(context.WithoutCancel(ctx), before)
		},
		p.prlimit(ctx, strconv.Itoa(len(open)))
}

func (p process) prlimit(ctx context.Context, files string) error {
	var status syscall.Stat_t
	if err := syscall.Stat(fmt.Sprintf("/proc/%d", p.pid), &status); err != nil {
		return err
	}
	out, err := exec.CommandContext(ctx, "setpriv", fmt.Sprintf("--reuid=%d", status.Uid), fmt.Sprintf("--regid=%d", status.Gid), "--clear-groups",
		"prlimit", fmt.Sprintf("--pid=%d", p.pid), "--nofile="+files+":").CombinedOutput()
	if err != nil {
		return fmt.Errorf("limit the files of %s: %w\n%s", p, err, out)
	}
	return nil
}

// memory is the cgroup that limits the memory of a container.
type memory struct {
	dir, limit, usage string
}

// memory returns the process's cgroup for memory, in either version of cgroups.
func (p process) memory() (memory, error) {
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", p.pid))
	if err != nil {
		return memory{}, err
	}
	for line := range strings.Lines(string(groups)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) != 3 {
			continue
		}
		switch {
		case fields[1] == "memory":
			return memory{"/sys/fs/cgroup/memory" + fields[2], "memory.limit_in_bytes", "memory.usage_in_bytes"}, nil
		case fields[0] == "0" && fields[1] == "":
			m := memory{"/sys/fs/cgroup" + fields[2], "memory.max", "memory.current"}
			if _, err := os.Stat(filepath.Join(m.dir, m.limit)); err == nil {
				return m, nil
			}
		}
	}
	return memory{}, fmt.Errorf("%s is in no cgroup for memory", p)
}

// lower sets the limit to what is used and some more bytes, and returns a function that sets the
// limit back.
func (m memory) lower(more int) (func() error, error) {
	limit := filepath.Join(m.dir, m.limit)
	before, err := os.ReadFile(limit)
	if err != nil {
		return nil, err
	}
	usage, err := os.ReadFile(filepath.Join(m.dir, m.usage))
	if err != nil {
		return nil, err
	}
	used, err := strconv.Atoi(strings.TrimSpace(string(usage)))
	if err != nil {
		return nil, err
	}
	if strings.TrimSpace(string(before)) == strconv.FormatUint(1<<63-4096, 10) {
		before = []byte("-1") // version 1 reads and writes no limit differently
	}
	return func() error {
			err := os.WriteFile(limit, bytes.TrimSpace(before), 0)
			if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ENODEV) {
				return nil // the container has ended, and the next one has a group of its own
			}
			return err
		},
		os.WriteFile(limit, []byte(strconv.Itoa(used+more)), 0)
}

// fill has another process of the cgroup take memory, until the kernel has killed the largest one.
func (m memory) fill(ctx context.Context) error {
	const take = 64 << 20 // tail keeps its input
	script := fmt.Sprintf("echo $$ >%s && head -c %d /dev/zero | tail >/dev/null", filepath.Join(m.dir, "cgroup.procs"), take)
	out, err := exec.CommandContext(ctx, "sh", "-c", script).CombinedOutput()
	if killed := (*exec.ExitError)(nil); errors.As(err, &killed) && killed.ExitCode() > 128 {
		return nil // the victim, or one of them
	}
	if err != nil {
		return fmt.Errorf("fill a cgroup: %w\n%s", err, out)
	}
	return nil
}
