package daemon

import "runtime/debug"

// Version of this build: the module's version, else the commit, else "devel". It is what the Go toolchain wrote into the
// binary.
func Version() string {
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
