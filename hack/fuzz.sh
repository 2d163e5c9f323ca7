#!/usr/bin/env bash
# Runs each fuzz target for FUZZTIME, by default 10s. FUZZ is a regular expression that
# chooses targets by their folder and name; with FUZZ_FOLDERS=N only those of N folders run, drawn
# anew each time, or as FUZZ_SEED says: to build the targets of all takes minutes.
#
#   fuzz.sh               starts from what Go's cache has kept of earlier runs
#   fuzz.sh -night FOLDER starts from the inputs in FOLDER, by default for 10m a target, and
#                         leaves there the smallest inputs that reach the same code
set -euo pipefail
cd "$(dirname "$0")/.."
top="$PWD"
module="$(GOWORK=off go list -m)"
corpora="$(go env GOCACHE)/fuzz/$module"
night=false
if [ "${1:-}" = -night ]; then
  night=true
  mkdir -p "$2"
  corpora="$(realpath "$2")"
  FUZZTIME="${FUZZTIME:-10m}"
fi
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# targets prints the folder and the name of each fuzz target. Examples with a module of their
# own have none.
targets() {
  grep -rEo --include='*_test.go' '^func Fuzz[A-Za-z0-9_]+' . |
    sed -E 's|^(.*)/[^/]*:func (.*)$|\1 \2|' | sort | grep -E "${FUZZ:-.}"
}

# found reports whether a failed run found a bug. Up to Go 1.26 a run may also fail
# because its time ended: go.dev/issue/75804, fixed in Go 1.27.
found() {
  grep -q 'Failing input written to' "$work/log" || ! grep -qx '    context deadline exceeded' "$work/log"
}

# reaches FOLDER TARGET INPUT prints the blocks of code that an input reaches, with the
# number of times, in powers of two.
reaches() {
  (cd "$work/replay" && "$work/$1/cover.test" -test.run="^$2\$/^$3\$" -test.coverprofile="$work/profile" >/dev/null)
  awk 'NR > 1 && $3 > 0 { print $1, int(log($3) / log(2)) }' "$work/profile"
}

# minimise FOLDER TARGET removes the inputs of a corpus that reach nothing which smaller ones
# do not reach. Those that fail stay.
minimise() {
  local corpus="$corpora/$1/$2" before input
  before="$(find "$corpus" -type f | wc -l)"
  [ -x "$work/$1/cover.test" ] || go test -c -covermode=count -coverpkg="$(go list -deps -test "$1" | grep "^$module[/a-z0-9]*\$" | paste -sd,)" -o "$work/$1/cover.test" "$1"
  mkdir -p "$work/replay/testdata/fuzz"
  ln -sfn "$corpus" "$work/replay/testdata/fuzz/$2"
  echo 'nothing yet' >"$work/reached" # awk takes an empty first file for no file
  for input in $(find "$corpus" -type f -printf '%s %f\n' | sort -n | cut -d' ' -f2); do
    reaches "$1" "$2" "$input" >"$work/reaches" || continue
    if awk 'NR == FNR { seen[$0]; next } !($0 in seen) { new = 1 } END { exit new }' "$work/reached" "$work/reaches"; then
      rm "$corpus/$input"
    else
      cat "$work/reaches" >>"$work/reached"
    fi
  done
  rm "$work/replay/testdata/fuzz/$2"
  echo "    kept $(find "$corpus" -type f | wc -l) inputs of $before"
}

# fuzz FOLDER TARGET. By default Go makes each input that is of interest smaller for up to a
# minute, in which slow targets try nothing else.
fuzz() {
  local binary="$work/$1/fuzz.test" corpus="$corpora/$1"
  mkdir -p "$work/$1" "$corpus/$2"
  [ -x "$binary" ] || go test -c -fuzz=. -o "$binary" "$1"
  if ! (cd "$1" && "$binary" -test.run='^$' -test.fuzz="^$2\$" -test.fuzztime="${FUZZTIME:-10s}" -test.fuzzminimizetime=20x -test.fuzzcachedir="$corpus") >"$work/log" 2>&1 && found; then
    cat "$work/log"
    exit 1
  fi
  printf '%s %s: %s\n' "$1" "$2" "$(grep '^fuzz: elapsed' "$work/log" | tail -n 1)"
}

targets >"$work/targets"
if [ -n "${FUZZ_FOLDERS:-}" ]; then
  seed="${FUZZ_SEED:-$((RANDOM * 32768 + RANDOM))}"
  echo "folders drawn by chance, seed $seed; the same again: FUZZ_SEED=$seed"
  cut -d' ' -f1 "$work/targets" | sort -u | awk -v seed="$seed" 'BEGIN { srand(seed) } { print rand() "\t" $0 }' | sort -n | cut -f 2 | sed -n "1,${FUZZ_FOLDERS}p" >"$work/folders"
  awk 'NR == FNR { drawn[$1]; next } $1 in drawn' "$work/folders" "$work/targets" >"$work/drawn"
  mv "$work/drawn" "$work/targets"
fi
while read -r folder target; do
  cd "$top"
  fuzz "$folder" "$target"
  if "$night"; then
    minimise "$folder" "$target"
  fi
done <"$work/targets"
