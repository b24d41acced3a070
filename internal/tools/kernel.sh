#!/usr/bin/env bash
# Prints the folder of a Linux kernel for internal/testenv/vm: vmlinuz, and its modules for networking. It is Debian's,
# unpacked into the cache by version; the newest one there is taken. Installs nothing on the host.
set -euo pipefail

cache=${SLICECAST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/slicecast}/kernel
mkdir -p "$cache"
# Of its modules, in the order of their folders.
parts="net lib fs/9p fs/netfs fs/fscache fs/overlayfs drivers/virtio drivers/char/virtio_console.ko drivers/net/dummy.ko
	drivers/net/veth.ko drivers/net/virtio_net.ko drivers/net/net_failover.ko drivers/net/vxlan drivers/net/bonding arch crypto"
# newest gives the newest kernel that has all of them.
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
	[[ $(uname -m) == x86_64 ]] || give_up "it is there for x86_64 only"
	command -v apt-get apt-cache dpkg-deb >/dev/null || give_up "it is fetched with apt-get, and this is not a Debian system"
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
		[[ $EUID == 0 ]] || give_up "apt-get knows no linux-image-amd64 package (run 'apt-get update' as root)"
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
