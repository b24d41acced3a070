// Command release makes everything that a release consists of, without a container engine, and
// pushes its images: archives of the programs, images of the server and of the agent, the chart,
// SBOMs, checksums, signatures and provenance.
//
// The base of all images has the files that programs without a C library need. The image
// agent-iptables also has the programs of iptables. Both parts come from the Debian packages in
// packages.txt, which pin.sh writes. The same sources, version and packages make the same bytes,
// except for signatures.
//
// Run it in the root of the repository:
//
//	release build [--version=VERSION] [--key=FILE | --platforms=LIST] DIR
//	release images [--version=VERSION] DIR
//	release push DIR REGISTRY
package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := newCommand().ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func newCommand() *cobra.Command {
	root := &cobra.Command{Use: "release", SilenceErrors: true, SilenceUsage: true}
	var version string
	addVersion := func(c *cobra.Command) {
		c.Flags().StringVar(&version, "version", "",
			"Version of the programs, and tag of the images. If empty, it is what git describe says of the current commit.")
	}
	var o options
	build := &cobra.Command{
		Use:   "build DIR",
		Short: "Make everything that a release consists of; without --key, this is a dry run",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := newRelease(cmd.Context(), version)
			if err != nil {
				return err
			}
			o.dir = args[0]
			return r.build(cmd.Context(), o)
		},
	}
	addVersion(build)
	build.Flags().StringVar(&o.key, "key", "", "Path of the private key of releases. If empty, a key is made and not kept.")
	build.Flags().StringSliceVar(&o.platforms, "platforms", nil,
		"Platforms of the archives in a dry run, such as linux/amd64, separated by commas. If empty, all platforms.")
	images := &cobra.Command{
		Use:   "images DIR",
		Short: "Make the images only",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := newRelease(cmd.Context(), version)
			if err != nil {
				return err
			}
			p, remove, err := newPrograms(r)
			if err != nil {
				return err
			}
			defer remove()
			return writeImages(cmd.Context(), args[0], p)
		},
	}
	addVersion(images)
	push := &cobra.Command{
		Use:   "push DIR REGISTRY",
		Short: "Push the images in a folder that build or images has written",
		Args:  cobra.ExactArgs(2),
		RunE:  func(cmd *cobra.Command, args []string) error { return push(cmd.Context(), args[0], args[1]) },
	}
	root.AddCommand(build, images, push)
	return root
}

// release identifies what is released.
type release struct {
	version  string
	revision string    // the commit
	created  time.Time // of the commit, or $SOURCE_DATE_EPOCH in a dry run
	sources  string    // the folder of the sources
}

// epoch is the variable that sets the time of a dry run, in seconds since 1970.
const epoch = "SOURCE_DATE_EPOCH"

// newRelease describes the sources in the working directory. An empty version stands for what git
// describe says.
func newRelease(ctx context.Context, version string) (release, error) {
	r := release{version: version, sources: "."}
	var err error
	if r.version == "" {
		if r.version, err = git(ctx, "describe", "--tags", "--match=v[0-9]*", "--always", "--abbrev=12", "--dirty"); err != nil {
			return r, err
		}
	}
	if r.version == "latest" {
		return r, fmt.Errorf("version latest would not say what is in the images: name a version, such as v1.2.3")
	}
	if r.revision, err = git(ctx, "rev-parse", "HEAD"); err != nil {
		return r, err
	}
	seconds := os.Getenv(epoch)
	if seconds == "" {
		if seconds, err = git(ctx, "log", "-1", "--format=%ct"); err != nil {
			return r, err
		}
	}
	unix, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return r, fmt.Errorf("%s: %w: set it to seconds since 1970", epoch, err)
	}
	r.created = time.Unix(unix, 0).UTC()
	return r, nil
}

func git(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "git", args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("git %s: %w: run it in a clone of the repository", strings.Join(args, " "), err)
	}
	return strings.TrimSpace(string(out)), nil
}

// progress reports what is being done.
func progress(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }
