#!/usr/bin/env bash
# Compares the exported API with that of the last release, on each system. Fails unless
# CHANGELOG.md names what breaks, as docs/STABILITY.md promises.
# SERVICEPLANE_API_BASE compares with another commit.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=hack/tools.sh
source hack/tools.sh

systems=(linux darwin windows)

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# write_api DIRECTORY SUFFIX writes what the packages of a module export, by system.
# apidiff's warnings are shown only if it fails.
write_api() (
  cd "$1"
  export GOWORK=off
  module="$(go list -m)"
  for system in "${systems[@]}"; do
    GOOS=$system "$APIDIFF" -m -w "$work/$system.$2" "$module" 2>"$work/log" || { cat "$work/log" >&2; exit 1; }
  done
)

# compare FOLDER compares a module with the base, which may not have it.
compare() {
  local module
  [ -e "$work/base/$1/go.mod" ] || return 0
  write_api "$work/base/$1" old
  write_api "$1" new
  for system in "${systems[@]}"; do
    "$APIDIFF" -m -allow-internal "$work/$system.old" "$work/$system.new" >"$work/$system" 2>"$work/log" || { cat "$work/log" >&2; exit 1; }
  done
  module="$(cd "$1" && GOWORK=off go list -m)"
  echo "$module compared with ${since:-$base} on ${systems[*]}"
  go run ./internal/guard/promise -module="$module" -since="$since" "${systems[@]/#/$work/}"
}

# Outside of a repository of its own, as in an unpacked archive, --show-cdup fails or
# prints a path.
if [ -n "$(git rev-parse --show-cdup 2>&1)" ]; then
  echo '!! THE API WAS NOT COMPARED: this folder is not the top of a git repository.'
  exit 0
fi
if [ "$(git rev-parse --is-shallow-repository)" = true ]; then
  GIT_TERMINAL_PROMPT=0 git fetch --quiet --unshallow --tags origin </dev/null || true
fi
# The last release before HEAD; HEAD may be a release itself.
since="$(git describe --tags --abbrev=0 --match='v[0-9]*' --exclude='*-*' "${SERVICEPLANE_API_BASE:-HEAD^}" 2>/dev/null || true)"
base="${SERVICEPLANE_API_BASE:-$since}"
if [ -z "$base" ]; then
  echo 'the API was not compared: there is no release yet'
  exit 0
fi
if ! git cat-file -e "$base^{commit}" 2>/dev/null; then
  echo "!! THE API WAS NOT COMPARED: commit $base is not in this clone; fetch it, with the tags."
  exit 0
fi

need_apidiff
mkdir "$work/base"
git archive "$base" . ':!examples' | tar -x -C "$work/base"
compare .
compare node/nodeproxy
