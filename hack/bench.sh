#!/usr/bin/env bash
# Prints the speeds at the sizes of large clusters, each beside its floor of the same
# run, and then the tables of docs/PERFORMANCE.md with them. With -write it also puts
# both into docs/. With -write and packages only their benchmarks run again, and the
# others keep their figures. Needs root, and a machine that does nothing else; takes an
# hour. With -check it only proves that every benchmark works, at small sizes, and that the
# documents show those of its figures that do not depend on the machine.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=hack/tools.sh
source hack/tools.sh
case "${1:-}" in
  '' | -write | -check) ;;
  *)
    echo "usage: $0 [-check | -write [PACKAGE…]]" >&2
    exit 2
    ;;
esac

only="${*:2}" before=docs/benchmarks.txt output="$(mktemp)"
trap 'rm -f "$output"' EXIT
export SERVICEPLANE_REQUIRE_KERNEL=1

# machine says where and with what the figures are made.
machine() {
  if [ -n "$only" ]; then
    awk -v RS= 'NR == 1' "$before"
    return
  fi
  printf 'date: %s\n' "$(date -u +%F)"
  printf 'commit: %s\n' "$(git describe --always --dirty --exclude='*')"
  printf 'load: %s\n' "$(cut -d' ' -f1 /proc/loadavg)"
  printf 'cpu: %s\n' "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)"
  printf 'cores: %s\n' "$(nproc)"
  printf 'kernel: %s\n' "$(uname -sr)"
  printf 'go: %s\n' "$(go env GOVERSION)"
  printf 'iptables: %s\n' "$(iptables --version | cut -d' ' -f2)"
  printf 'nginx: %s\n' "$(nginx -v 2>&1 | cut -d/ -f2)"
}

# bench PACKAGE BENCHMARKS FLAG… runs benchmarks, after the command that does so.
bench() {
  local package="$1" names="$2" command
  shift 2
  command="command: SERVICEPLANE_BENCH_FULL=1 go test -run='^\$' -bench='$names' $* $package"
  if [[ -n "$only" && " $only " != *" $package "* ]]; then
    printf '\n'
    COMMAND="$command" awk -v RS= -F'\n' '$1 == ENVIRON["COMMAND"]' "$before"
    return
  fi
  printf '\n%s\n' "$command"
  if [ -n "$only" ]; then
    printf 'measured again on %s at commit %s, load %s\n' "$(date -u +%F)" "$(git describe --always --dirty --exclude='*')" "$(cut -d' ' -f1 /proc/loadavg)"
  fi
  SERVICEPLANE_BENCH_FULL=1 go test -run='^$' -bench="$names" "$@" -timeout=30m "$package"
}

# quiet waits until nobody else is at work on the machine. What is written needs a commit
# that others can check out, too.
quiet() {
  local left=600
  if [ -n "$(git status --porcelain)" ]; then
    echo 'uncommitted changes: commit them first, so that the figures name what was measured' >&2
    exit 1
  fi
  until awk '{ exit $1 >= 0.5 }' /proc/loadavg; do
    if [ "$left" = 0 ]; then
      echo "the load is $(cut -d' ' -f1 /proc/loadavg) after ten minutes of waiting: end what else runs here" >&2
      exit 1
    fi
    sleep 5
    left=$((left - 5))
  done
}

need_nginx
need_apt iptables iptables
need_apt nft nftables
if [ "${1:-}" = -check ]; then
  status=0
  go test -run='^$' -bench=. -benchtime=1x -timeout=40m -json work >"$output" || status=1
  go run ./internal/guard/summary "$output" || status=1
  go run ./internal/guard/figures check "$output" || status=1
  exit "$status"
fi
if [ "${1:-}" = -write ]; then
  go build work # or the compiler is at work when the first benchmark is
  quiet
fi
{
  machine
  bench ./internal/nftables '^BenchmarkTargets$' -benchtime=1x
  bench ./internal/nftables '^BenchmarkStalls$' -benchtime=1x
  bench ./internal/nftables '^BenchmarkBalancing$' -benchtime=1x
  bench ./node/endpointhealth '^BenchmarkThousandEndpoints$' -benchtime=2x
  bench ./iptables '^BenchmarkTargets$/./^serviceplane$/^N=1000$' -benchtime=1x # as in the proof
  bench ./iptables '^BenchmarkTargets$/./^serviceplane$/^N=5000$' -benchtime=1x -count=3
  bench ./ipvs '^BenchmarkTargets$' -benchtime=0.2s -count=3
  bench ./userspace '^BenchmarkTargets$' -benchtime=5x -count=3
  bench ./userspace '^BenchmarkProxies$/^throughput$' -benchtime=9x # fast or slow, as the cores fall
  bench ./userspace '^BenchmarkProxies$/^connections$' -benchtime=3x
  bench ./userspace '^BenchmarkIdle$' -benchtime=1x -count=3
  bench ./conntrack '^BenchmarkClean$' -benchtime=1x -count=3
  bench ./changetracker '^Benchmark(FlipOneEndpoint|InitialLoad|OneChangeAmong)$' -benchtime=0.2s -count=3
  bench ./node/tracing '^BenchmarkUnsampledConnection$' -benchtime=0.2s -count=3
  bench ./internal/nftables '^BenchmarkCounts$' -benchtime=1x
  bench ./iptables '^BenchmarkCounts$' -benchtime=20x
  bench ./nftables '^BenchmarkTraffic$' -benchtime=1x
  bench ./conntrack '^BenchmarkTraffic$' -benchtime=3x
  bench ./node/debughttp '^BenchmarkServices$/^N=30000$' -benchtime=5x
  bench ./node/nodeproxy '^BenchmarkMemory$' -benchtime=1x
  bench ./desired '^BenchmarkHugeService$' -benchtime=0.2s -count=3
  bench ./internal/nftables '^BenchmarkHuge$' -benchtime=0.2s -count=3
  bench ./internal/nftables '^BenchmarkLarge$' -benchtime=1x
  bench ./node/nodeproxy '^BenchmarkEventToPacket$' -benchtime=1x
  bench ./internal/packetcost '^BenchmarkPackets$' -benchtime=1x
  bench ./ebpf '^BenchmarkSockets$' -benchtime=1x
  bench ./ebpf '^BenchmarkForward$' -benchtime=1x -count=3
} | tee "$output"

if [ "${1:-}" = -write ]; then
  cp "$output" docs/benchmarks.txt
  go run ./internal/guard/figures write
fi
go run ./internal/guard/figures print "$output"
