#!/usr/bin/env bash
# Prints the folder of a Linux kernel for internal/testenv/vm, which contains vmlinuz and its
# modules for networking. The kernel is that of Debian, unpacked into a folder of the cache named by
# its version. The newest one in the cache is used. Nothing is installed on the host.
set -euo pipefail

cache=${SLICECAST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/slicecast}/kernel
mkdir -p "$cache"
# The parts of the kernel's modules to keep, as paths in their folder.
parts="net lib fs/9p fs/netfs fs/fscache fs/overlayfs drivers/virtio drivers/char/virtio_console.ko drivers/net/dummy.ko
	drivers/net/veth.ko drivers/net/virtio_net.ko drivers/net/net_failover.ko drivers/net/vxlan drivers/net/bonding arch crypto"
# newest prints the folder of the newest kernel in the cache that has all parts.
newest() {
	local dir
	while read -r dir; do
		if [[ $(cat "$dir/parts" 2>/dev/null) == "$parts" ]]; then
			echo "$dir"
			return
		fi
	done < <(find "$cache" -mindepth 2 -maxdepth 2 -name vmlinuz -printf '%h\n' | sort -rV)
}
dir=$(newest)
if [[ -z $dir ]]; then
	give_up() {
		echo "no kernel for the virtual machine: $1" >&2
		exit 1
	}
	[[ $(uname -m) == x86_64 ]] || give_up "only x86_64 is supported"
	command -v apt-get apt-cache dpkg-deb >/dev/null || give_up "apt-get fetches it, but this is not a Debian system"
	exec 9>"$cache/lock"
	flock 9
	dir=$(newest)
fi
if [[ -z $dir ]]; then
	unpack=$(mktemp -d "$cache/unpack.XXXXXX")
	trap 'rm -rf "$unpack"' EXIT
	package() { apt-cache depends linux-image-amd64 | awk '$1 == "Depends:" && $2 ~ /^linux-image-/ { print $2; exit }'; }
	download() { (cd "$unpack" && apt-get -q -o APT::Sandbox::User=root download "$(package)") >&2; }
	echo "fetching Debian's linux-image-amd64 into $cache (once)" >&2
	if ! download; then
		[[ $EUID == 0 ]] || give_up "apt-get does not know the package linux-image-amd64 (run 'apt-get update' as root)"
		apt-get -q update >&2 || give_up "apt-get update failed"
		download || give_up "apt-get could not download linux-image-amd64"
	fi
	dpkg-deb --fsys-tarfile "$unpack"/linux-image-*.deb | tar -x -C "$unpack"
	modules=("$unpack"/lib/modules/*)
	version=$(basename "${modules[0]}")
	keep=$unpack/keep
	mkdir -p "$keep/modules/drivers"
	mv "$unpack"/boot/vmlinuz-* "$keep/vmlinuz"
	for part in $parts; do
		mkdir -p "$(dirname "$keep/modules/$part")"
		mv "${modules[0]}/kernel/$part" "$keep/modules/$part"
	done
	find "$keep/modules" -name '*.ko.xz' -exec xz -d {} +
	echo "$parts" >"$keep/parts"
	rm -rf "${cache:?}/$version"
	mv "$keep" "$cache/$version"
	dir=$cache/$version
fi
echo "$dir"
