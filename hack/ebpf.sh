#!/usr/bin/env bash
# Compiles the BPF programs of package ebpf, and of the study internal/decide, for both byte orders, into files that are
# committed: who builds the package needs Go only. Debian's clang 14 gives everybody the
# same bytes. With -check it fails if they are not those of the repository.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=hack/tools.sh
source hack/tools.sh

need_apt clang-14 clang-14
need_apt llvm-strip-14 llvm-14
[ -e /usr/include/bpf/bpf_helpers.h ] || install_apt libbpf-dev
[ -e /usr/include/linux/bpf.h ] || install_apt linux-libc-dev

# compile PACKAGE NAME SOURCE FLAG…
compile() {
  local package="$1" name="$2" source="$3"
  shift 3
  (cd "$package" && GOPACKAGE="$(basename "$package")" go run github.com/cilium/ebpf/cmd/bpf2go \
    -cc clang-14 -strip llvm-strip-14 -target bpfel,bpfeb -tags linux \
    -cflags "-O2 -g -Wall -Werror -I/usr/include/$(uname -m)-linux-gnu $*" "$name" "$source")
}

compile ebpf sockets4 bpf/sockets.c
compile ebpf sockets6 bpf/sockets.c -DIPV6
compile ebpf forward4 bpf/forward.c && compile ebpf forward6 bpf/forward.c -DIPV6
compile internal/decide decide bpf/decide.c && rm internal/decide/decide_bpf*.go # only its test uses the programs
compile ebpf stale4 bpf/stale.c && compile ebpf stale6 bpf/stale.c -DIPV6
if [ "${1:-}" = -check ] && [ -n "$(git status --porcelain -- ebpf internal/decide)" ]; then
  git status --short -- ebpf internal/decide
  echo 'the compiled programs are not those of the source: commit what hack/ebpf.sh has made'
  exit 1
fi
