#!/usr/bin/env bash
# test.sh [KERNEL…] runs the kernel tests on other kernels than this machine's, in
# virtual machines: 6.1, the oldest that README promises, unless others are named.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=hack/tools.sh
source hack/tools.sh

packages=(./nftables)
kernels=("${@:-6.1}")

for needed in nft:nftables qemu-system-x86_64:qemu-system-x86 busybox:busybox-static depmod:kmod xz:xz-utils; do
  need_apt "${needed%%:*}" "${needed#*:}" >/dev/null
done
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
status=0
for kernel in "${kernels[@]}"; do
  SERVICEPLANE_VM="$(hack/vm/base.sh "$kernel")"
  export SERVICEPLANE_VM
  echo "Linux $(cat "$SERVICEPLANE_VM/release"):"
  # One after the other: two machines would starve each other.
  SERVICEPLANE_REQUIRE_KERNEL=1 CGO_ENABLED=0 go test -p 1 -count=1 -timeout=14m -json \
    -exec "$PWD/hack/vm/run" "${packages[@]}" >"$log" || status=1
  go run ./internal/guard/summary "$log" || status=1
done
exit "$status"
