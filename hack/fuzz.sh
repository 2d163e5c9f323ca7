#!/usr/bin/env bash
# Gives each fuzz target FUZZTIME, 10s unless set.
set -euo pipefail
cd "$(dirname "$0")/.."
log="$(mktemp)"
trap 'rm -f "$log"' EXIT

# targets prints the directory and the name of each fuzz target.
targets() {
  grep -rEo --include='*_test.go' '^func Fuzz[A-Za-z0-9_]+' . |
    sed -E 's|^(.*)/[^/]*:func (.*)$|\1 \2|' | sort
}

# found says whether a failed run has found something. Up to Go 1.26 the end of
# the time may pass for a failure: go.dev/issue/75804, mended in Go 1.27.
found() {
  grep -q 'Failing input written to' "$log" || ! grep -qx '    context deadline exceeded' "$log"
}

list="$(targets)"
while read -r directory target; do
  if ! go test -run='^$' -fuzz="^$target\$" -fuzztime="${FUZZTIME:-10s}" "$directory" >"$log" 2>&1 && found; then
    cat "$log"
    exit 1
  fi
  printf '%s %s: %s\n' "$directory" "$target" "$(grep '^fuzz: elapsed' "$log" | tail -n 1)"
done <<<"$list"
