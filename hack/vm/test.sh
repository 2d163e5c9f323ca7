#!/usr/bin/env bash
# test.sh [-all | -packets | -draw N] [KERNEL…] runs kernel tests on other kernels than this
# machine's, in virtual machines: 5.10, the oldest that README promises, and 6.12, unless
# others are named; see base.sh. With -all it also runs 6.1 and the newest one, and on each
# kernel what depends little on the kernel. With -packets it runs the packet tests of every
# engine and no others, also on this machine's kernel.
# With -draw it runs N packages on each kernel, by chance: DRAW_SEED repeats it.
set -euo pipefail
cd "$(dirname "$0")/../.."

oldest=5.10
selection=short draw=
kernels=("$oldest" 6.12)
case "${1:-}" in
-all | -packets)
  selection="${1#-}"
  kernels=("$oldest" 6.1 6.12 newest)
  shift
  ;;
-draw)
  draw="$2"
  seed="${DRAW_SEED:-$((RANDOM * 32768 + RANDOM))}"
  echo "drawn by chance, seed $seed; the same again: DRAW_SEED=$seed hack/vm/test.sh $*"
  shift 2
  ;;
esac
if [ "$selection" != short ]; then
  export SERVICEPLANE_ALL=1 # all settings of ebpf, and both families
fi
if [ "$selection" = packets ]; then
  kernels+=(host)
fi
if [ "$#" -gt 0 ]; then
  kernels=("$@")
fi

# without_udp KERNEL prints the tests of package ebpf that need Linux 6.5.
without_udp() {
  if [ "$1" = 6.1 ]; then
    echo 'TestUDP|'
  fi
}

# runs KERNEL prints packages, and which of their tests; all, if none are named. In
# emulation everything takes several times as long, so what depends little on the
# kernel is left out. IPVS runs nowhere else. In -skip, a pattern that begins with a
# slash must be the last one: it hides those after it.
runs() {
  case "$selection $1" in
  packets*)
    echo './iptables -run=^TestPacketsWithNFT$ -skip=/spreading'
    echo './iptables -run=^TestPacketsWithLegacy$ -skip=/spreading'
    echo './userspace -run=^TestPacketsWithNFTables$ -skip=/spreading'
    echo './userspace -run=^TestPacketsWithIPTables$ -skip=/spreading'
    echo './nftables -run=^TestPackets$ -skip=/spreading'
    if [ "$1" != "$oldest" ]; then
      echo "./ebpf -run=^TestPackets\$ -skip=$(without_udp "$1")//spreading"
    fi
    if [ "$1" != host ]; then
      echo './ipvs -tags=vm -run=^(TestPackets|TestAffinityEndsAfterItsTimeout)$ -skip=/spreading'
    fi
    return
    ;;
  all*)
    if [ "$1" != "$oldest" ]; then
      echo "./ebpf -skip=TestWithoutPrivilege|$(without_udp "$1")//spreading" # setpriv is not there
    fi
    echo './ipvs -tags=vm -skip=TestEveryHistory'
    echo './node/nodeproxy -run=TestNoConnectionIsCut' # changes from and to mode ipvs
    echo './userspace/localhost -tags=vm -run=TestPacketsWithIPVS'
    echo './internal/refusals -tags=vm -run=IPVS'
    echo './internal/coexistence -tags=vm -run=^TestBesideFlowtables$'
    echo './iptables -tags=vm -run=^TestPacketsBesideAFlowtable$'
    echo './nftables -tags=vm -skip=/spreading/(7|10)_endpoints'
    echo ./internal/nftables -tags=vm
    echo './iptables -run=TestPacketsWith -skip=/spreading'
    echo './userspace -run=^TestPacketsWith(NFTables|IPTables)$ -skip=/spreading'
    ;;
  "short $oldest")
    echo './ipvs -tags=vm -skip=TestEveryHistory|/spreading/(7|10)_endpoints'
    echo './iptables -run=TestPacketsWithLegacy -skip=/spreading'
    echo './node/nodeproxy -run=TestNoConnectionIsCut/(nftables_to_ipvs|ipvs_to_nftables|kube-proxy)'
    echo './userspace/localhost -tags=vm -run=TestPacketsWithIPVS/PKT-32'
    echo './iptables -run=^TestPacketsWithNFT$/^PKT-(01|23|47|61)$'
    echo './userspace -run=^TestPacketsWith(NFTables|IPTables)$/^PKT-(01|30)$'
    echo './nftables -skip=TestExplainAgrees|/spreading'
    echo './internal/refusals -run=^TestNoConnectionIsLostDuringAChange$/^nftables$'
    echo './internal/nftables -tags=vm -run=FastPath|Devices'
    echo './nftables -tags=vm -run=TestEstablishedFlows|TestStaleFlows|TestFastFlows|TestTrafficOfTheFastPath'
    echo './internal/nftables -skip=TestTimeoutsAddUp|TestATenantWhoVaries|TestAnyHistory|TestALoudNeighbour|TestAnyFailedMessage|TestRulesArePrinted|TestEachCall|TestHistories|TestNewSourceRanges'
    ;;
  *)
    if [ "$1" = 6.1 ]; then
      echo "./ebpf -run=^TestPackets\$ -skip=$(without_udp "$1")//spreading"
    else
      echo './ebpf -tags=vm -run=^TestUnderLockdown$|^TestUDP'
    fi
    echo './ipvs -tags=vm -run=TestPackets$|TestAffinityEnds|TestAFlowtable -skip=/spreading'
    echo './internal/nftables -tags=vm -run=FastPath|Devices'
    echo './nftables -tags=vm -run=TestEstablishedFlows|TestStaleFlows|TestTheFastPathThroughTunnels|TestPacketsBesideAFlowtable'
    ;;
  esac
  echo './conntrack -tags=vm'
  if [ "$1" = "$oldest" ]; then
    echo './internal/netns -run=TestOutcomes'
    echo './userspace -run=TestIdleConnectionsAreHeld' # descriptors have no limit there
  fi
}

# chosen KERNEL prints the runs, or those that are drawn.
chosen() {
  if [ -z "$draw" ]; then
    runs "$1"
  else
    runs "$1" | awk -v seed="$seed" 'BEGIN { srand(seed) } { print rand() "\t" $0 }' | sort -n | cut -f 2 | sed -n "1,${draw}p"
  fi
}

logs="$(mktemp -d)"
trap 'rm -rf "$logs"' EXIT
status=0

# start KERNEL ARGUMENT… runs tests in a virtual machine, or here if KERNEL is host. The limits are
# for what hangs: emulated on a busy machine, the packets of ebpf in all modes take most of an hour.
start() {
  local kernel="$1"
  shift
  if [ "$kernel" = host ]; then
    set -- -timeout=3h "$@"
  else
    set -- -timeout=3h -exec "$PWD/hack/vm/run" "$@"
  fi
  SERVICEPLANE_VM_FILES="$PWD/docs/COEXISTENCE.md" \
    SERVICEPLANE_VM="${machines[$kernel]}" SERVICEPLANE_VM_TIMEOUT=11400 SERVICEPLANE_REQUIRE_KERNEL=1 CGO_ENABLED=0 go test -count=1 -json "$@"
}

declare -A machines
for kernel in "${kernels[@]}"; do
  machines[$kernel]=
  if [ "$kernel" != host ]; then
    machines[$kernel]="$(hack/vm/base.sh "$kernel")"
  fi
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
    start "$kernel" "${arguments[@]}" >"$logs/$kernel/$started" </dev/null &
  done < <(chosen "$kernel")
done
for ((left = started < 2 ? started : 2; left > 0; left--)); do
  wait -n || status=1
done

for kernel in "${kernels[@]}"; do
  release="$(uname -r)"
  if [ "$kernel" != host ]; then
    release="$(cat "${machines[$kernel]}/release")"
  fi
  echo "Linux $release:"
  cat "$logs/$kernel"/* >"$logs/$kernel.json"
  SERVICEPLANE_REQUIRE_KERNEL=1 go run ./internal/guard/summary "$logs/$kernel.json" || status=1
done
exit "$status"
