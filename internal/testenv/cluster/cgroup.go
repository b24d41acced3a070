package cluster

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/slicecast/slicecast/internal/testenv"
)

// cgroupPatience bounds the time in which the kernel ends the killed processes of a cgroup.
const cgroupPatience = 30 * time.Second

// cgroupHierarchies returns the folders at which the machine's hierarchies of cgroups are mounted:
// one of version 2, or many of version 1.
func cgroupHierarchies() ([]string, error) {
	mounts, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer mounts.Close()
	var hierarchies []string
	lines := bufio.NewScanner(mounts)
	for lines.Scan() {
		mount, filesystem, _ := strings.Cut(lines.Text(), " - ")
		if fields := strings.Fields(mount); strings.HasPrefix(filesystem, "cgroup") && len(fields) > 4 {
			hierarchies = append(hierarchies, fields[4])
		}
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if len(hierarchies) == 0 {
		return nil, errors.New("no cgroups are mounted: mount them below /sys/fs/cgroup")
	}
	return hierarchies, nil
}

// createCgroup creates a cgroup in all hierarchies, and those above it.
func createCgroup(name string) error {
	hierarchies, err := cgroupHierarchies()
	if err != nil {
		return err
	}
	for _, hierarchy := range hierarchies {
		dir := hierarchy
		for part := range strings.SplitSeq(name, "/") {
			parent := dir
			dir = filepath.Join(dir, part)
			if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("create a cgroup: %w", err)
			}
			if err := prepareCgroup(parent, dir); err != nil {
				return fmt.Errorf("prepare cgroup %s: %w", dir, err)
			}
		}
	}
	return nil
}

// prepareCgroup makes a new cgroup usable. In version 1, a group of cpuset has no CPUs at first. In
// version 2, the group above decides which controllers it has.
func prepareCgroup(parent, dir string) error {
	for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
		content, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || strings.TrimSpace(string(content)) != "" {
			continue
		}
		inherited, err := os.ReadFile(filepath.Join(parent, name))
		if err != nil || strings.TrimSpace(string(inherited)) == "" {
			continue // version 2 inherits by itself
		}
		if err := os.WriteFile(filepath.Join(dir, name), inherited, 0); err != nil {
			return err
		}
	}
	controllers, err := os.ReadFile(filepath.Join(parent, "cgroup.controllers"))
	if errors.Is(err, fs.ErrNotExist) || len(controllers) == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	enable := "+" + strings.Join(strings.Fields(string(controllers)), " +")
	return os.WriteFile(filepath.Join(parent, "cgroup.subtree_control"), []byte(enable), 0)
}

// removeCgroup removes a cgroup and those below it, once the kernel has ended their processes. It
// returns nil if there is no such group.
func removeCgroup(name string) error {
	hierarchies, err := cgroupHierarchies()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), cgroupPatience)
	defer cancel()
	for _, hierarchy := range hierarchies {
		err := testenv.WaitFor(ctx, func() error { return removeGroups(filepath.Join(hierarchy, name)) })
		if err != nil {
			return fmt.Errorf("remove cgroup %s: %w", name, err)
		}
	}
	return nil
}

func removeGroups(root string) error {
	var dirs []string
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() {
			dirs = append(dirs, path)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
	if err != nil {
		return err
	}
	for _, dir := range slices.Backward(dirs) {
		if err := syscall.Rmdir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%s: %w", dir, err)
		}
	}
	return nil
}
