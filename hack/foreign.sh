#!/usr/bin/env bash
# foreign.sh builds a root directory of each Debian release below, with programs that
# write rules of their own, and prints the directory that contains them. It installs
# nothing: programs run there after chroot(2), so files of this machine stay as they are.
# apt checks signatures and digests of what it downloads. A second call uses the cache. It
# needs Debian, and root for device files.
set -euo pipefail

# Releases, and the packages in the root of each.
declare -A packages=(
  [bullseye]='nftables iptables'
  [bookworm]='nftables iptables'
  [trixie]='nftables iptables ipset netavark ufw firewalld dbus-daemon containernetworking-plugins dash coreutils grep sed procps'
)
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

# archive prints the address of the archive that this machine installs from.
archive() {
  apt-get indextargets --format '$(ORIGIN) $(CODENAME) $(REPO_URI)' 'Created-By: Packages' |
    awk '$1 == "Debian" && $2 !~ /-/ {print $3; exit}'
}

# download DIRECTORY RELEASE fetches packages, and all that they depend on.
download() {
  local state="$1/$2.apt" options
  mkdir -p "$state"/{lists,cache/archives}/partial
  touch "$state/status" # nothing is installed
  echo "deb [signed-by=$keyring] $address $2 main" >"$state/sources.list"
  options=(
    -q -o "Dir::Etc::SourceList=$state/sources.list" -o Dir::Etc::SourceParts=/dev/null
    -o "Dir::State::Lists=$state/lists" -o "Dir::State::Status=$state/status" -o "Dir::Cache=$state/cache"
    -o APT::Sandbox::User=root -o Acquire::Languages=none
  )
  apt-get "${options[@]}" update >&2
  # shellcheck disable=SC2086 # several packages
  apt-get "${options[@]}" install -y --download-only --no-install-recommends ${packages[$2]} >&2
}

# unpack DIRECTORY RELEASE makes the root.
unpack() {
  local root="$1/$2" name deb
  mkdir -p "$root"/{usr/bin,usr/sbin,usr/lib,usr/lib64,proc,sys,dev,tmp,run,etc}
  for name in bin sbin lib lib64; do
    ln -s "usr/$name" "$root/$name"
  done
  for deb in "$1/$2.apt/cache/archives"/*.deb; do
    dpkg-deb --fsys-tarfile "$deb" | tar -C "$root" -x --keep-directory-symlink
  done
  rm -rf "$1/$2.apt" "$root"/usr/share/{doc,locale,man}
  for name in iptables ip6tables; do # the choice of update-alternatives
    ln -sf "$name-nft" "$root/usr/sbin/$name"
    ln -sf "$name-nft-save" "$root/usr/sbin/$name-save"
    ln -sf "$name-nft-restore" "$root/usr/sbin/$name-restore"
  done
  mknod -m 666 "$root/dev/null" c 1 3
  mknod -m 666 "$root/dev/urandom" c 1 9
}

recipe="$(sha256sum "$0" | cut -c 1-12)"
roots="${XDG_CACHE_HOME:-$HOME/.cache}/serviceplane/foreign/$recipe"
mkdir -p "$(dirname "$roots")"
exec 9>"$roots.lock"
flock 9 # several tests may call this at once
if [ ! -e "$roots" ]; then
  echo 'downloading programs of others: nft and iptables of three releases, firewalld, ufw, netavark, CNI plugins' >&2
  address="$(archive)"
  if [ -z "$address" ]; then
    echo 'no archive of Debian among the sources of apt: run apt-get update' >&2
    exit 1
  fi
  work="$(mktemp -d "$roots.XXXXXX")"
  trap 'rm -rf "$work"' EXIT
  for release in "${!packages[@]}"; do
    download "$work" "$release"
    unpack "$work" "$release"
  done
  mv "$work" "$roots"
fi
echo "$roots"
