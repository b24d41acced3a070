#!/usr/bin/env bash
# Prints the path of an etcd server: the one in PATH, or Debian's package unpacked into the
# cache. Installs nothing on the host.
set -euo pipefail

if command -v etcd; then exit; fi

dir=${SLICECAST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/slicecast}/etcd
if [[ ! -x $dir/etcd ]]; then
	give_up() {
		echo "no etcd: $1; put an etcd (3.4 or newer) into PATH, for instance with 'apt-get install etcd-server'" >&2
		exit 1
	}
	command -v apt-get dpkg-deb >/dev/null || give_up "none in PATH, and this is not a Debian system to fetch it from"
	mkdir -p "$dir"
	exec 9>"$dir/lock"
	flock 9
	if [[ ! -x $dir/etcd ]]; then
		echo "fetching Debian's etcd-server into $dir (once)" >&2
		unpack=$(mktemp -d "$dir/unpack.XXXXXX")
		trap 'rm -rf "$unpack"' EXIT
		download() { (cd "$unpack" && apt-get -q -o APT::Sandbox::User=root download etcd-server) >&2; }
		if ! download; then
			[[ $EUID == 0 ]] || give_up "apt-get knows no etcd-server package (run 'apt-get update' as root)"
			apt-get -q update >&2 || give_up "apt-get update failed"
			download || give_up "apt-get could not download etcd-server"
		fi
		dpkg-deb -x "$unpack"/etcd-server_*.deb "$unpack"
		mv "$unpack/usr/bin/etcd" "$dir/etcd"
	fi
fi
echo "$dir/etcd"
