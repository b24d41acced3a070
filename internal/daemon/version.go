package daemon

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// release and commit are the version and the commit of programs that are released: those of images
// and archives. Their build sets them through the linker. They are empty in other builds.
var release, commit string

// Version returns the version of the release. Without one it returns what the Go toolchain
// recorded: the version of the module or, if it has none, the commit. Without either it returns
// "devel".
func Version() string { return build().version }

// AddVersion adds the flag --version to a command. The flag prints the version, the commit, the
// version of Go, and the platform, each in a line of its own.
func AddVersion(root *cobra.Command) {
	b := build()
	root.Version = b.version
	root.SetVersionTemplate(fmt.Sprintf("{{.DisplayName}} {{.Version}}\ncommit: %s\nGo: %s\nplatform: %s/%s\n",
		b.commit, runtime.Version(), runtime.GOOS, runtime.GOARCH))
}

// program is what is known of the sources that a program was built from. A commit of "unknown" was
// not recorded, as in builds of an archive of the sources.
type program struct{ version, commit string }

func build() program {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = &debug.BuildInfo{}
	}
	p := recorded(info)
	if release != "" {
		p.version = release
	}
	if commit != "" {
		p.commit = commit
	}
	return p
}

// recorded returns what the Go toolchain recorded.
func recorded(info *debug.BuildInfo) program {
	settings := make(map[string]string)
	for _, s := range info.Settings {
		settings[s.Key] = s.Value
	}
	revision := settings["vcs.revision"]
	if revision != "" && settings["vcs.modified"] == "true" {
		revision += "-dirty"
	}
	switch v := info.Main.Version; {
	case v != "" && v != "(devel)" && revision != "":
		return program{v, revision}
	case v != "" && v != "(devel)":
		return program{v, "unknown"}
	case revision != "":
		return program{revision, revision}
	}
	return program{"devel", "unknown"}
}
