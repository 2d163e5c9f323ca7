#!/usr/bin/env bash
# Compares the exported API with that of the last release, on each system, and fails
# unless CHANGELOG.md names what has changed, as docs/STABILITY.md promises.
# SERVICEPLANE_API_BASE compares with another commit.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=hack/tools.sh
source hack/tools.sh

# What is compared with as long as there is no release.
FIRST_BASE=ae4000a45fd6baeb967eaf1ac1ff694f93f19027

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# judge holds CHANGELOG.md against what apidiff has printed.
judge() {
  go run ./internal/guard/promise "$@"
}

# not_compared REASON ends the script. The changelog is judged without changes.
not_compared() {
  echo "!! THE API WAS NOT COMPARED: $1."
  judge -stale=false
  exit 0
}

# tag ARGUMENT… prints the last release, of those that git describe sees.
tag() {
  git describe --tags --abbrev=0 --match='v[0-9]*' --exclude='*-*' "$@" 2>/dev/null || true
}

has() {
  git cat-file -e "$1^{commit}" 2>/dev/null
}

# find_base sets base, the commit to compare with; since, the last release up to
# there; and release, if what is here is one, and nothing was changed after it.
find_base() {
  release=
  if git diff --quiet HEAD 2>/dev/null; then
    release="$(tag --exact-match HEAD)"
  fi
  since="$(tag --exclude="$release" HEAD)"
  base="${since:-$FIRST_BASE}"
  if [ -n "${SERVICEPLANE_API_BASE:-}" ]; then
    base="$SERVICEPLANE_API_BASE"
    since="$(tag "$base")"
  fi
}

# complete brings the rest of a shallow clone: it lacks tags, too.
complete() {
  echo 'this clone is shallow; fetching the rest of its history'
  GIT_TERMINAL_PROMPT=0 git fetch --quiet --unshallow --tags origin </dev/null || true
}

# lacks_tags says whether the changelog knows an older release, and git none. The
# first section may be a release to come.
lacks_tags() {
  [ -z "$since" ] && awk -v this="## $release " '
    /^## / && n++ && /^## v/ && index($0, this) != 1 { older = 1 }
    END { exit !older }' CHANGELOG.md
}

# apidiff ARGUMENT… tells what it ignores only if it fails.
apidiff() {
  if ! "$APIDIFF" "$@" 2>"$work/trouble"; then
    cat "$work/trouble" >&2
    return 1
  fi
}

# write_api DIRECTORY SUFFIX writes what the packages of a module export, by system.
write_api() (
  cd "$1"
  module="$(go list -m)"
  for system in "${systems[@]}"; do
    GOOS=$system apidiff -m -w "$work/$system.$2" "$module"
  done
)

# No name begins at the top of a repository; an error is some text, too.
if [ -n "$(git rev-parse --show-cdup 2>&1)" ]; then
  not_compared 'there is no history here'
fi
find_base
if [ "$(git rev-parse --is-shallow-repository)" = true ] && { [ -z "$since" ] || ! has "$base"; }; then
  complete
  find_base
fi
if ! has "$base"; then
  not_compared "commit $base is not in this clone"
fi
if [ -z "${SERVICEPLANE_API_BASE:-}" ] && lacks_tags; then
  not_compared 'CHANGELOG.md knows releases, and this clone has no tag of them'
fi

need_apidiff
systems=(linux darwin windows)
mkdir "$work/base"
git archive "$base" . ':!examples' | tar -x -C "$work/base"
write_api "$work/base" old
write_api . new
reports=()
for system in "${systems[@]}"; do
  apidiff -m -allow-internal "$work/$system.old" "$work/$system.new" >"$work/$system"
  reports+=("$system=$work/$system")
done

# An entry may be about a change before the base, unless the base is where the
# changelog's section begins.
stale=true
if [ -n "${SERVICEPLANE_API_BASE:-}" ]; then
  stale=false
fi
echo "compared with ${since:-$base} on ${systems[*]}"
judge -module="$(go list -m)" -since="$since" -release="$release" -stale="$stale" "${reports[@]}"
