package daemon

import "runtime/debug"

// release is the version of commands in images. The build of the images sets it through the linker,
// so that it is the images' tag. It is empty in other builds.
var release string

// Version returns the version of the release. Without one it returns what the Go toolchain
// recorded: the version of the module or, if it has none, the commit. Without either it returns
// "devel".
func Version() string {
	if release != "" {
		return release
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "devel"
	}
	return version(info)
}

func version(info *debug.BuildInfo) string {
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	settings := make(map[string]string)
	for _, s := range info.Settings {
		settings[s.Key] = s.Value
	}
	revision := settings["vcs.revision"]
	if revision == "" {
		return "devel"
	}
	if settings["vcs.modified"] == "true" {
		return revision + "-dirty"
	}
	return revision
}
