#!/usr/bin/env bash
# The gate: installs what it needs, and answers each question about a change once. As root on
# Linux it also runs the kernel tests; then a skipped test is a failure. Longer runs, other kernels
# and what the gate draws by chance are proofs: hack/prove.sh lists them.
#
# SERVICEPLANE_SEED=N draws the same again.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=hack/tools.sh
source hack/tools.sh

# As nodeproxy's image is built: so all but the race detector compiles once.
export CGO_ENABLED=0 GOFLAGS=-trimpath
# Memory for time: compilers and tests collect garbage less often, which saves a fifth of what they compute.
export GOGC=400 GOMEMLIMIT=2GiB
export SERVICEPLANE_SEED="${SERVICEPLANE_SEED:-$(od -An -N2 -tu2 /dev/urandom | tr -d ' ')}"

# Packages with goroutines run with the race detector. Where the kernel decides, and where data is
# only walked, it proves nothing: those run without it, and the proofs race the former.
raced=(./node/canary/... ./node/endpointhealth ./node/healthcheck ./hybrid ./informer ./internal/apitest ./internal/fleet ./internal/pause ./internal/poll
  ./node/leastconnections ./node/metrics ./node/programmed/... ./proxier ./runner ./node/nodeproxy/spctl ./node/tracing ./userspace ./proxier/connection ./node/zaplog)
# Tests of raced packages that run without it: they send packets through rules, or count.
plain='^(TestPackets|TestExplainAgrees|TestCounts$|TestASyncIsInProportion|TestFailuresCostLittle)'
together='^(TestUpdatesAndAppliesAtTheSameTime|TestASnapshotIsSeenWhole)$' # of trackers, with goroutines
# Only proofs run these.
proofs='^(TestHistoriesCatchPlantedBugs|TestChaos|TestSoak)$'

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# step NAME COMMAND… runs a command under a heading, and notes its duration. The command runs in
# a subshell that ends at its first failure: in a condition, or after "!", the shell would ignore
# it. All steps run, also after one has failed: a machine far away tells all at once.
failed=''
step() {
  local name="$1" start=$SECONDS status
  shift
  printf '\n== %s\n' "$name"
  set +e
  (
    set -e
    "$@"
  )
  status=$?
  set -e
  if [ "$status" != 0 ]; then
    failed+="${failed:+; }$name"
    name="FAILED: $name"
    printf '\n%s\n' "$name"
  fi
  printf '%6d s  %s\n' "$((SECONDS - start))" "$name" >>"$work/steps"
}

# programs installs what tests compare with, or run beside.
programs() {
  need_apt nft nftables
  need_apt iptables iptables
  need_apt ipset ipset
  need_apt bpftool bpftool
  need_apt python3 python3
  need_apt chromium chromium
  need_apt chromedriver chromium-driver
  need_nginx
  hack/foreign.sh
}

# everywhere COMMAND… runs a command in each module, as its go.mod says.
everywhere() {
  local module
  for module in . node/nodeproxy examples examples/gateway; do
    (cd "$module" && GOWORK=off "$@")
  done
}

# floor builds the library with the oldest versions that go.mod admits, and tests what depends most
# on those of Kubernetes. All other tests have the newest ones, which nodeproxy needs (go.work).
floor() {
  GOWORK=off go build ./...
  GOWORK=off go test -count=1 -vet=off ./changetracker ./informer ./internal/manifest ./node/programmed/...
}

# other_than CHANCE NAME… prints the names but one.
other_than() {
  local n=$(($1 % ($# - 1) + 2)) i
  for ((i = 2; i <= $#; i++)); do
    [ "$i" = "$n" ] || echo "${!i}"
  done
}

# left_out prints an expression: of the tests that do the same to two variants, one of each, by
# chance; and the proofs'.
left_out() {
  local seed="$SERVICEPLANE_SEED"
  {
    other_than "$seed" TestPacketsWithNFT TestPacketsWithLegacy
    other_than "$((seed / 2))" TestExplainAgreesWithPacketsOfNFT TestExplainAgreesWithPacketsOfLegacy
    other_than "$((seed / 4))" TestTraceAgreesWithExplainOfNFT TestTraceAgreesWithExplainOfLegacy
    other_than "$((seed / 8))" TestPacketsWithNFTables TestPacketsWithIPTables
  } | paste -sd'|' | sed "s/.*/$proofs|^(&)\$/"
}

# run FLAG… runs tests, and nothing from the cache: a result of yesterday says nothing about this
# kernel. vet runs with the linter.
run() {
  go test -count=1 -vet=off -timeout=40m -json "$@"
}

# tests runs more packages of the kernel than there are processors at a time: these tests mostly
# wait for packets. They do not disturb each other: each has network namespaces of its own.
tests() {
  local status=0 race=(-race) others
  if [ "$(CGO_ENABLED=1 go env CC)" = '' ] || ! command -v "$(CGO_ENABLED=1 go env CC)" >/dev/null; then
    echo '!! NO C COMPILER: the tests run without the race detector.'
    race=()
  fi
  # The longest one first: packages begin in this order.
  mapfile -t others < <(go list ./node/nodeproxy && comm -23 <(go list work | sort) <(go list "${raced[@]}" ./node/nodeproxy | sort))
  {
    CGO_ENABLED="${#race[@]}" GOFLAGS='' run "${race[@]}" -skip="$plain|$proofs" "${raced[@]}" || status=1
    CGO_ENABLED="${#race[@]}" GOFLAGS='' run "${race[@]}" -run="$together" ./changetracker || status=1
    run -run="$plain" -skip="$(left_out)" ./userspace ./proxier ./node/endpointhealth ./node/metrics >"$work/plain.json" &
    run -p "$((2 * $(getconf _NPROCESSORS_ONLN)))" -skip="$(left_out)" "${others[@]}" || status=1
    wait "$!" || status=1
    cat "$work/plain.json"
    (cd examples/gateway && GOWORK=off run ./...) || status=1
  } >"$work/json"
  go run ./internal/guard/summary "$work/json" >"$work/tests" || status=1
  sed '/ passed, /,$d' "$work/tests"
  return "$status"
}

if [ "$(uname -s)" = Linux ] && [ "$(id -u)" = 0 ]; then
  step 'programs, and roots of other distributions' programs
  export SERVICEPLANE_REQUIRE_KERNEL=1 SERVICEPLANE_REQUIRE_BPFTOOL=1 SERVICEPLANE_REQUIRE_BROWSER=1
else
  echo '!! NOT ROOT ON LINUX: kernel tests are skipped; run as root to test packets.'
fi
step 'modules are tidy' everywhere go mod tidy -diff
step 'the oldest libraries that go.mod admits' floor
step 'format, vet, lint' hack/lint.sh
step 'build for Windows' hack/platforms.sh -windows
step 'tests' tests

printf '\n'
sed -n '/ passed, /,$p' "$work/tests"
printf 'steps:\n%s\n' "$(cat "$work/steps")"
printf 'drawn with SERVICEPLANE_SEED=%s, in %ss\n' "$SERVICEPLANE_SEED" "$SECONDS"
if [ -n "$failed" ]; then
  printf 'FAILED: %s\n' "$failed"
  exit 1
fi
echo 'the gate is green'
