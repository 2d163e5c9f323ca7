#!/usr/bin/env bash
# Installs what the tests need, and runs all checks and tests. As root on Linux it
# also runs the kernel tests; then a skipped test is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=hack/tools.sh
source hack/tools.sh

portable=(./changetracker ./desired ./runner ./proxier ./hybrid ./healthcheck ./programmed ./canary ./canary/nftrace ./metrics ./tracing ./debughttp ./userspace ./ebpf ./zaplog ./packettrace)
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# step NAME COMMAND… runs a command under a heading and prints its duration. The
# command runs in a subshell that ends at its first failure: in a condition, or
# after "!", the shell would ignore it. The first step that fails ends the script,
# but once keep_going is set, later ones run too: a machine far away tells all at once.
keep_going='' failed=''
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
    printf '\nFAILED: %s\n' "$name"
    [ -n "$keep_going" ] || exit 1
    failed+="${failed:+; }$name"
  fi
  printf -- '-- %s: %ss\n' "$name" "$((SECONDS - start))"
}

browser() {
  need_apt chromium chromium
  need_apt chromedriver chromium-driver
}

formatted() {
  local wrong
  wrong="$(gofmt -l .)"
  if [ -n "$wrong" ]; then
    printf 'not formatted:\n%s\n' "$wrong"
    return 1
  fi
}

# everywhere COMMAND… runs a command in each module: this one, and those of examples with
# dependencies that no embedder should get.
everywhere() {
  local module
  for module in . examples/gateway; do
    (cd "$module" && "$@")
  done
}

# platforms proves that everything, tests included, compiles on a system that is not
# Linux, that portable packages build on Windows, and engines on another processor. To
# compile everything for each of them would take minutes.
platforms() {
  GOOS=darwin go build "${portable[@]}"
  GOOS=darwin everywhere go vet ./...
  GOOS=windows go vet "${portable[@]}"
  GOOS=linux GOARCH=arm64 go vet ./nftables ./internal/nftables ./iptables ./ipvs ./conntrack ./userspace
}

# tests runs everything with the race detector, and nothing from the cache: a
# result of yesterday says nothing about this kernel. More packages than processors
# run at a time: tests mostly wait, many of them for packets that must not arrive. They
# do not disturb each other: each has network namespaces of its own. The longest two
# come first.
tests() {
  local flags=(-race) status=0
  if [ "$(go env CGO_ENABLED)" != 1 ]; then # so it is without a C compiler
    echo '!! NO C COMPILER: the tests run without the race detector.'
    flags=()
  fi
  flags+=(-count=1 -p "$((2 * $(getconf _NPROCESSORS_ONLN)))" -timeout=40m -json)
  go test "${flags[@]}" ./userspace ./iptables ./... >"$work/tests.json" || status=1
  go test -C examples/gateway "${flags[@]}" ./... >>"$work/tests.json" || status=1
  go run ./internal/guard/summary "$work/tests.json" >"$work/tests" || status=1
  cat "$work/tests"
  return "$status"
}

# soak opens too many connections for the race detector.
soak() {
  SERVICEPLANE_SOAK=1 go test -count=1 -run=TestShortConnectionsLeaveNothing ./userspace
}

# benchmarks proves that every benchmark works, at small sizes, and that the
# documents show the figures of these benchmarks.
benchmarks() {
  local status=0
  go test -run='^$' -bench=. -benchtime=1x -json ./... >"$work/benchmarks.json" || status=1
  go run ./internal/guard/summary "$work/benchmarks.json" || status=1
  if [ "${SERVICEPLANE_REQUIRE_KERNEL:-}" = 1 ]; then
    go run ./internal/guard/figures check "$work/benchmarks.json" || status=1
  fi
  return "$status"
}

if [ "$(uname -s)" = Linux ] && [ "$(id -u)" = 0 ]; then
  export SERVICEPLANE_REQUIRE_KERNEL=1
  step 'nft, which tests compare output with' need_apt nft nftables
  step 'iptables, both variants' need_apt iptables iptables
  step 'ipset, whose sets kube-proxy leaves' need_apt ipset ipset
  step 'bpftool, which prints maps in a test' need_apt bpftool bpftool
  export SERVICEPLANE_REQUIRE_BPFTOOL=1
  step 'nginx, for benchmarks' need_nginx
  step 'programs of others, whose rules stay' hack/foreign.sh
  export SERVICEPLANE_REQUIRE_BROWSER=1
  step 'Chromium, for tests of the page' browser
else
  echo '!! NOT ROOT ON LINUX: kernel tests are skipped; run as root to test packets.'
fi
step 'format' formatted
step 'modules are tidy' everywhere go mod tidy -diff
step 'build, with the examples' everywhere go build ./...
step 'go vet' everywhere go vet ./...
step 'other platforms' platforms
if [ "$(uname -s)" = Linux ] && [ "$(id -u)" = 0 ]; then
  step 'BPF programs are those of their source' hack/ebpf.sh -check
fi
step 'git, for the tag of the last release' need_apt git git
step "nodeproxy's binary, as in its image: same bytes, SBOM, licences" hack/supplychain.sh
step 'apidiff' need_apidiff
export SERVICEPLANE_REQUIRE_APIDIFF=1
step 'API against the last release' hack/api.sh
step 'linter' need_golangci_lint
step 'lint, with staticcheck and gofumpt' everywhere "$GOLANGCI_LINT" run ./...
keep_going=1
step 'tests' tests
step '200,000 short connections' soak
if [ "${SERVICEPLANE_REQUIRE_KERNEL:-}" = 1 ]; then
  step 'tests on other kernels, in virtual machines' hack/vm/test.sh
fi
step 'fuzz' env FUZZTIME="${FUZZTIME:-1s}" FUZZ_FOLDERS="${FUZZ_FOLDERS:-5}" hack/fuzz.sh # make fuzz is longer
step 'benchmarks' benchmarks
sed -n '/ passed, /,$p' "$work/tests"
if [ -n "$failed" ]; then
  printf '\nFAILED: %s\n' "$failed"
  exit 1
fi
printf '\nall steps passed in %ss\n' "$SECONDS"
