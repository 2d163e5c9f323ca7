#!/usr/bin/env bash
# base.sh KERNEL builds the parts of a virtual machine and prints their directory:
# vmlinuz, and base.cpio with the kernel's network modules, busybox and the programs
# that tests need. KERNEL is 5.10, 6.1, 6.12 or newest, Debian's builds; newest is the newest
# one that Debian has for its unstable release or for trixie. A second call uses the cache.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=hack/tools.sh
source hack/tools.sh

# The programs in the machine, beside busybox's.
programs=(nft ipvsadm ipset xtables-nft-multi xtables-legacy-multi)
# Modules that nothing loads by name, beside all of netfilter's.
modules=(virtio_pci virtio_console veth bridge br_netfilter dummy vrf tun sch_ingress cls_bpf ipip ip6_tunnel vxlan)
# What /init and people need of busybox.
applets=(sh mount umount modprobe insmod lsmod cat ls ip tar id env true false seq head tail wc sort
  awk sed poweroff dmesg echo mkdir ln cp rm chmod sleep sysctl grep ps stty uname)

# origin KERNEL prints the package that always depends on the newest build, and the suites of
# Debian that may have it.
origin() {
  case "$1" in
  5.10) echo linux-image-cloud-amd64 bullseye-security ;;
  6.1) echo linux-image-cloud-amd64 bookworm-security ;;
  6.12) echo linux-image-6.12-cloud-amd64 bookworm-security ;;
  newest) echo linux-image-cloud-amd64 sid trixie-backports ;;
  *)
    echo "kernel $1: want 5.10, 6.1, 6.12 or newest" >&2
    return 1
    ;;
  esac
}

# mirrors SUITE… prints the lines of a sources.list for suites, at the mirrors where this
# machine gets its own release and the security updates of it.
mirrors() {
  local suite archive
  for suite in "$@"; do
    archive='[a-z]*'
    case "$suite" in *-security) archive='[a-z]*-security' ;; esac
    apt-get indextargets --format '$(CREATED_BY) $(ORIGIN) $(REPO_URI) $(RELEASE)' |
      sed -n "s|^Packages Debian \([^ ]*\) $archive\$|deb [signed-by=$keys] \1 $suite main|p" | sort -u
  done
}

# configure DIRECTORY SUITE… gives apt a state of its own: packages of another release
# must never be installed on this machine. All suites have one priority, so that the newest
# version is the candidate.
configure() {
  mkdir -p "$1/lists/partial" "$1/cache/archives/partial"
  mirrors "${@:2}" >"$1/sources.list"
  if [ ! -s "$1/sources.list" ]; then # the names of mirrors come from their lists
    apt-get update -q >&2
    mirrors "${@:2}" >"$1/sources.list"
  fi
  printf 'Package: *\nPin: release n=*\nPin-Priority: 500\n' >"$1/preferences"
  cat >"$1/apt.conf" <<EOF
Dir::Etc::SourceList "$1/sources.list";
Dir::Etc::SourceParts "/dev/null";
Dir::Etc::Preferences "$1/preferences";
Dir::Etc::PreferencesParts "/dev/null";
Dir::State::Lists "$1/lists";
Dir::State::Status "/dev/null";
Dir::Cache "$1/cache";
Acquire::Languages "none";
APT::Sandbox::User "root";
EOF
  export APT_CONFIG="$1/apt.conf"
}

# needs PACKAGE KIND prints the packages of a kernel's build that a package depends on: those
# with a version in their name.
needs() {
  { apt-cache depends "$1" 2>/dev/null || true; } | sed -n "s/^ *Depends: \(linux-$2-[0-9].*\)\$/\1/p"
}

# package prints the name of the newest build; old ones leave the archive.
package() { needs "$1" image | head -n 1; }

candidate() { apt-cache policy "$1" | sed -n 's/^ *Candidate: //p'; }

# unpack DIRECTORY PACKAGE downloads a package, and the other parts of its build that newer
# kernels are split into, without installing them. apt checks that Debian signed them.
unpack() {
  local builds deb
  mapfile -t builds < <(needs "$2" '[a-z]*')
  (cd "$1" && apt-get download -q "$2" "${builds[@]}" >/dev/null)
  mkdir -p "$1/x/usr/lib"
  ln -s usr/lib "$1/x/lib"
  for deb in "$1"/*.deb; do
    dpkg-deb --fsys-tarfile "$deb" | tar -C "$1/x" -x --keep-directory-symlink
  done
}

# take_modules ROOT TREE RELEASE copies modules, with all that they depend on.
take_modules() {
  local root="$1" tree="$2" release="$3" name file target
  {
    printf '%s\n' "${modules[@]}"
    find "$tree/lib/modules/$release/kernel/net" -path '*/netfilter/*' -name '*.ko*' |
      sed 's|.*/||; s|\.ko.*||'
  } | sort -u | while read -r name; do
    # A module may be built in, or not exist in this kernel: then it has no file.
    modprobe -d "$tree" -S "$release" --show-depends "$name" 2>/dev/null | awk '$1 == "insmod" {print $2}' || true
  done | sort -u | while read -r file; do
    target="$root/${file#"$tree"/}"
    mkdir -p "$(dirname "$target")"
    case "$file" in
    *.xz) xz -dc "$file" >"${target%.xz}" ;; # busybox reads no compressed modules
    *) cp "$file" "$target" ;;
    esac
  done
  cp "$tree/lib/modules/$release"/modules.{order,builtin,builtin.modinfo} "$root/lib/modules/$release/"
  depmod -b "$root" "$release"
}

# take_libraries ROOT FILE… copies the libraries that files are linked with.
take_libraries() {
  local root="$1" library
  shift
  ldd "$@" | grep -oE '^[[:space:]].*/[^ :]+' | grep -oE '/[^ ]+' | sort -u | while read -r library; do
    [ -e "$root$library" ] || install -D "$library" "$root$library"
  done
}

# take_program ROOT NAME copies a program and the libraries that it is linked with.
take_program() {
  local root="$1" path
  path="$(readlink -f "$(command -v "$2")")"
  install -D "$path" "$root/usr/bin/$2"
  take_libraries "$root" "$path"
}

# take_iptables ROOT copies the extensions of iptables, and gives its programs all of
# their names.
take_iptables() {
  local root="$1" extensions variant family program
  extensions="$(dirname "$(find /usr/lib -name libxt_conntrack.so | head -n 1)")"
  mkdir -p "$root$extensions"
  cp -r "$extensions/." "$root$extensions/"
  take_libraries "$root" "$extensions"/*.so
  for variant in nft legacy; do
    for family in iptables ip6tables; do
      for program in '' -save -restore; do
        ln -sf "xtables-$variant-multi" "$root/usr/bin/$family-$variant$program"
      done
    done
  done
}

# populate ROOT makes the file system around the modules.
populate() {
  local root="$1" name
  mkdir -p "$root"/{bin,sbin,usr/bin,proc,sys,dev,tmp,run,etc,out,root}
  cp "$(command -v busybox)" "$root/bin/busybox"
  for name in "${applets[@]}"; do
    ln -s busybox "$root/bin/$name"
  done
  ln -s ../bin/busybox "$root/sbin/modprobe" # where the kernel looks for it
  for name in "${programs[@]}"; do
    take_program "$root" "$name"
  done
  take_iptables "$root"
  printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n' >"$root/etc/passwd"
  printf '127.0.0.1 localhost\n::1 localhost\n' >"$root/etc/hosts"
  printf 'tcp 6 TCP\nudp 17 UDP\n' >"$root/etc/protocols" # for ipset
  cp hack/vm/init "$root/init"
  chmod +x "$root/init"
}

# build DIRECTORY PACKAGE makes the parts aside, and moves them when they are whole.
build() {
  local work release image
  work="$(mktemp -d)"
  # shellcheck disable=SC2064 # work is what it is now
  trap "rm -rf '$work'" EXIT
  unpack "$work" "$2"
  release="$(basename "$work"/x/lib/modules/*)"
  mkdir -p "$work/parts" "$work/root/lib/modules/$release"
  depmod -b "$work/x" "$release"
  take_modules "$work/root" "$work/x" "$release"
  populate "$work/root"
  (cd "$work/root" && find . | LC_ALL=C sort | busybox cpio -o -H newc 2>/dev/null) >"$work/parts/base.cpio"
  for image in "$work/x/boot/vmlinuz-$release" "$work/x/lib/modules/$release/vmlinuz"; do
    [ ! -e "$image" ] || cp "$image" "$work/parts/vmlinuz"
  done
  echo "$release" >"$work/parts/release"
  mkdir -p "$(dirname "$1")"
  rm -rf "$1"
  mv "$work/parts" "$1"
}

# parts_of PACKAGE prints where its parts are. What they are made of is in the name.
parts_of() {
  local recipe
  recipe="$(cat hack/vm/base.sh hack/vm/init "$(command -v nft)" "$(command -v iptables-nft)" | sha256sum | cut -c 1-12)"
  echo "$cache/${1}_$(candidate "$1")-$recipe"
}

# What makes a machine, what runs it, and the programs in it.
for needed in nft:nftables iptables:iptables ipvsadm:ipvsadm ipset:ipset qemu-system-x86_64:qemu-system-x86 busybox:busybox-static depmod:kmod xz:xz-utils; do
  need_apt "${needed%%:*}" "${needed#*:}" >/dev/null
done
keys=/usr/share/keyrings/debian-archive-keyring.gpg
cache="${XDG_CACHE_HOME:-$HOME/.cache}/serviceplane/vm"
origin="$(origin "$1")"
read -r meta suites <<<"$origin"
state="$cache/apt-${suites// /-}"
# shellcheck disable=SC2086 # several suites
configure "$state" $suites
kernel="$(package "$meta")"
if [ -z "$kernel" ] || [ ! -e "$(parts_of "$kernel")/release" ]; then
  apt-get update -q >&2 # the archive may have a newer one, and have it alone
  kernel="$(package "$meta")"
fi
if [ -z "$kernel" ]; then
  echo "package $meta of Debian $suites: not at the mirrors of $state/sources.list" >&2
  exit 1
fi
parts="$(parts_of "$kernel")"
if [ ! -e "$parts/release" ]; then
  echo "making a virtual machine of $kernel" >&2
  build "$parts" "$kernel"
fi
echo "$parts"
