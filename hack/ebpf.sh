#!/usr/bin/env bash
# Compiles the BPF programs of package ebpf for little-endian machines into files that are committed: who
# builds the package needs Go only. Debian's clang 14 gives everybody the same bytes. With -check it fails if
# they are not those of the repository.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=hack/tools.sh
source hack/tools.sh

need_apt clang-14 clang-14
need_apt llvm-strip-14 llvm-14
[ -e /usr/include/bpf/bpf_helpers.h ] || install_apt libbpf-dev
[ -e /usr/include/linux/bpf.h ] || install_apt linux-libc-dev

# compile OBJECT SOURCE FLAG…
compile() {
  local object="$1" source="$2"
  shift 2
  clang-14 -target bpfel -O2 -g -Wall -Werror -fno-ident -fdebug-compilation-dir . -mcpu=v1 "$@" \
    -I"/usr/include/$(uname -m)-linux-gnu" -c "$source" -o "$object"
  llvm-strip-14 -g "$object"
}

cd ebpf
for source in sockets forward stale; do
  compile "${source}4.o" "bpf/$source.c"
  compile "${source}6.o" "bpf/$source.c" -DIPV6
done
if [ "${1:-}" = -check ] && [ -n "$(git status --porcelain -- .)" ]; then
  git status --short -- .
  echo 'the compiled programs are not those of the source: commit what hack/ebpf.sh has made'
  exit 1
fi
