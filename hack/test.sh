#!/usr/bin/env bash
# Runs all checks and all tests, and brings what they need. As root it runs the
# kernel tests too, and then a skipped test is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=hack/tools.sh
source hack/tools.sh

portable=(./changetracker ./desired ./runner ./proxier)
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# step NAME COMMAND… runs a command under a heading, with its duration. The
# command is in a subshell that ends at its first failure: in a condition, or
# after "!", the shell would go on.
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
    exit 1
  fi
  printf -- '-- %s: %ss\n' "$name" "$((SECONDS - start))"
}

formatted() {
  local wrong
  wrong="$(git ls-files -co --exclude-standard '*.go' | xargs gofmt -l)"
  if [ -n "$wrong" ]; then
    printf 'not formatted:\n%s\n' "$wrong"
    return 1
  fi
}

# documented proves that the linter notices an exported symbol without comment.
documented() {
  local probe=runner/zz_undocumented.go
  printf 'package runner\n\ntype Undocumented struct{}\n' >"$probe"
  if "$TOOLS/golangci-lint" run ./runner >"$work/probe" 2>&1; then
    rm -f "$probe"
    echo 'an exported symbol without doc comment passes the linter'
    return 1
  fi
  rm -f "$probe"
  grep -q 'Undocumented should have comment' "$work/probe"
}

builds() {
  local os
  for os in windows darwin; do
    GOOS=$os go build "${portable[@]}"
    GOOS=$os go vet "${portable[@]}"
    GOOS=$os go build ./...
  done
  GOOS=linux GOARCH=arm64 go vet ./...
}

# tests runs everything with the race detector. The kernel tests of different
# packages do not disturb each other: each test has its own network namespaces.
# A cached result would say nothing about this machine's kernel.
tests() {
  local race=(-race) status=0
  if [ "$(id -u)" = 0 ] && [ "$(uname -s)" = Linux ]; then
    export SERVICEPLANE_REQUIRE_KERNEL=1
  else
    echo '!! NOT ROOT: the kernel tests are skipped, and nothing is proved about packets.'
  fi
  [ "$(go env CGO_ENABLED)" = 1 ] && command -v "${CC:-gcc}" >/dev/null || race=()
  [ ${#race[@]} -gt 0 ] || echo '!! no C compiler: without the race detector'
  go test -count=1 "${race[@]}" -timeout 20m -json ./... >"$work/tests.json" || status=$?
  go run ./internal/guard/summary "$work/tests.json" >"$work/summary" || status=1
  cat "$work/summary"
  return "$status"
}

# fuzz gives each fuzz target some runs; `make fuzz` gives more. Runs and not time,
# because a fuzzer that is stopped by the clock sometimes calls that a failure.
fuzz() {
  local package target
  while read -r package target; do
    echo "$package $target"
    go test -run='^$' -fuzz="^$target\$" -fuzztime="${FUZZ_RUNS:-20000}x" "$package" >"$work/fuzz" 2>&1 || {
      cat "$work/fuzz"
      return 1
    }
  done < <(git grep -o --untracked '^func Fuzz[A-Za-z0-9]*' -- '*_test.go' |
    sed -E 's|^(.*)/[^/]*:func (Fuzz.*)$|./\1 \2|')
}

# benchmarks proves that every benchmark works, at small sizes.
benchmarks() {
  go test -run='^$' -bench=. -benchtime=1x ./... >"$work/bench" 2>&1 || {
    cat "$work/bench"
    return 1
  }
  grep -c '^Benchmark' "$work/bench" | sed 's/$/ benchmarks ran/'
}

step 'tools' need_apt nft nftables
step 'linter' need_go golangci-lint github.com/golangci/golangci-lint/v2/cmd/golangci-lint "$GOLANGCI_LINT"
step 'format' formatted
step 'module is tidy' go mod tidy -diff
step 'build' go build ./...
step 'go vet' go vet ./...
step 'lint, with staticcheck' "$TOOLS/golangci-lint" run ./...
step 'doc comments are required' documented
step 'other platforms' builds
step 'tests' tests
step 'fuzz' fuzz
step 'benchmarks' benchmarks
printf '\nall steps passed in %ss\n' "$SECONDS"
tail -n 1 "$work/summary"
