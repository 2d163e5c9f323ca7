#!/usr/bin/env bash
# test.sh [-all] [KERNEL…] runs kernel tests on other kernels than this machine's, in
# virtual machines: 6.1, the oldest that README promises, and 6.12, unless others are
# named. With -all it also runs, on each kernel, what depends little on the kernel.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=hack/tools.sh
source hack/tools.sh

all=
if [ "${1:-}" = -all ]; then
  all=yes
  shift
fi
kernels=("${@:-6.1 6.12}")
read -ra kernels <<<"${kernels[*]}"

# runs KERNEL prints packages, and which of their tests; all, if none are named. In
# emulation everything takes several times as long, so what depends little on the
# kernel is left out. IPVS runs nowhere else. In -skip, a pattern that begins with a
# slash must be the last one: it hides those after it.
runs() {
  if [ "$all" ]; then
    echo './ipvs -tags=vm -skip=TestEveryHistory'
    echo './nftables -skip=/spreading'
    echo ./internal/nftables
    echo './iptables -run=TestPacketsWith -skip=/spreading'
  elif [ "$1" = 6.1 ]; then
    echo './ipvs -tags=vm -skip=TestEveryHistory|/spreading/(7|10)_endpoints'
    echo './iptables -run=TestPacketsWithLegacy -skip=/spreading'
    echo './nftables -skip=TestExplainAgrees|/spreading'
    echo './internal/nftables -skip=TestTimeoutsAddUp|TestATenantWhoVaries|TestAnyHistory|TestALoudNeighbour|TestAnyFailedMessage'
  else
    echo './ipvs -tags=vm -run=TestPackets|TestAffinityEnds -skip=/spreading'
  fi
  if [ "$1" = 6.1 ]; then
    echo './conntrack -skip=TestNoFlowIsStale'
    echo './internal/netns -run=TestOutcomes'
    echo './userspace -run=TestIdleConnectionsAreHeld' # descriptors have no limit there
  fi
}

for needed in nft:nftables iptables:iptables ipvsadm:ipvsadm qemu-system-x86_64:qemu-system-x86 busybox:busybox-static depmod:kmod xz:xz-utils; do
  need_apt "${needed%%:*}" "${needed#*:}" >/dev/null
done
logs="$(mktemp -d)"
trap 'rm -rf "$logs"' EXIT
status=0

declare -A machines
for kernel in "${kernels[@]}"; do
  machines[$kernel]="$(hack/vm/base.sh "$kernel")"
  mkdir "$logs/$kernel"
done

# Two at a time: one machine keeps little more than one processor busy.
started=0
for kernel in "${kernels[@]}"; do
  while read -ra arguments; do
    if [ "$started" -ge 2 ]; then
      wait -n || status=1
    fi
    started=$((started + 1))
    SERVICEPLANE_VM="${machines[$kernel]}" SERVICEPLANE_REQUIRE_KERNEL=1 CGO_ENABLED=0 \
      go test -count=1 -timeout=14m -json -exec "$PWD/hack/vm/run" "${arguments[@]}" \
      >"$logs/$kernel/$started" </dev/null &
  done < <(runs "$kernel")
done
for ((left = started < 2 ? started : 2; left > 0; left--)); do
  wait -n || status=1
done

for kernel in "${kernels[@]}"; do
  echo "Linux $(cat "${machines[$kernel]}/release"):"
  cat "$logs/$kernel"/* >"$logs/$kernel.json"
  go run ./internal/guard/summary "$logs/$kernel.json" || status=1
done
exit "$status"
