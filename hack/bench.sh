#!/usr/bin/env bash
# Prints the table of speeds, at the sizes of large clusters, each figure beside
# its floor of the same run. Needs root; takes some minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=hack/tools.sh
source hack/tools.sh
need_nginx
SERVICEPLANE_REQUIRE_KERNEL=1 SERVICEPLANE_BENCH_FULL=1 \
  go test -run='^$' -bench='^BenchmarkTargets$' -benchtime=1x -timeout=30m ./nftables
SERVICEPLANE_REQUIRE_KERNEL=1 SERVICEPLANE_BENCH_FULL=1 \
  go test -run='^$' -bench='^BenchmarkTargets$' -benchtime=1x -timeout=30m ./iptables
SERVICEPLANE_REQUIRE_KERNEL=1 SERVICEPLANE_BENCH_FULL=1 \
  go test -run='^$' -bench='^(BenchmarkProxies|BenchmarkTargets)$' -benchtime=5x -timeout=30m ./userspace
SERVICEPLANE_REQUIRE_KERNEL=1 SERVICEPLANE_BENCH_FULL=1 \
  go test -run='^$' -bench='^BenchmarkIdle$' -benchtime=1x ./userspace
SERVICEPLANE_REQUIRE_KERNEL=1 go test -run='^$' -bench='^BenchmarkClean$' -benchtime=5x ./conntrack
