#!/usr/bin/env bash
# Pins the Debian packages of the images: writes the current ones of Debian stable, with its
# security updates, to packages.txt. apt verifies Debian's signatures; the images are then built
# from the hashes. Needs apt and debian-archive-keyring, but changes nothing of this machine's apt.
set -euo pipefail
cd "$(dirname "$0")"

suite=trixie
architectures=(amd64 arm64)
# The base of all images: files only.
base=(base-files ca-certificates netbase tzdata)
# Both variants of iptables, modprobe, and the libraries of their programs. A test finds a library
# that is missing here, except liblzma5 and libzstd1: modprobe loads them for compressed modules.
iptables=(
	iptables kmod
	libc6 libip4tc2 libip6tc2 libkmod2 liblzma5 libmnl0 libnetfilter-conntrack3 libnfnetlink0 libnftnl11
	libssl3t64 libxtables12 libzstd1 zlib1g
)

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
for repository in "debian $suite" "debian $suite-updates" "debian-security $suite-security"; do
	echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/$repository main"
done >"$dir/sources.list"

# pin <architecture> <layer> <package>...
pin() {
	local architecture=$1 layer=$2
	shift 2
	run "$architecture" download --print-uris "$@" | sort |
		awk -v l="$layer" -v a="$architecture" '{ gsub("\047", "", $1); sub("SHA256:", "", $4); print l, a, $4, $1 }'
}

# run <architecture> <argument>... runs apt-get with lists of its own.
run() {
	local own=$dir/$1
	mkdir -p "$own/lists/partial" "$own/cache/archives/partial"
	touch "$own/status"
	apt-get -q -o APT::Architecture="$1" -o APT::Architectures="$1" -o APT::Sandbox::User=root \
		-o Acquire::Languages=none -o Dir::Cache="$own/cache" -o Dir::Etc::sourcelist="$dir/sources.list" \
		-o Dir::Etc::sourceparts=/dev/null -o Dir::State::lists="$own/lists" -o Dir::State::status="$own/status" "${@:2}"
}

{
	echo "# Written by pin.sh: layer, architecture, SHA-256 and address of each Debian package."
	echo "snapshot $(date -u +%Y%m%dT%H%M%SZ)"
	for architecture in "${architectures[@]}"; do
		run "$architecture" update >&2
		pin "$architecture" base "${base[@]}"
		pin "$architecture" iptables "${iptables[@]}"
	done
} >"$dir/packages.txt"
mv "$dir/packages.txt" packages.txt
