#!/usr/bin/env bash
# Checks what users of nodeproxy run:
#   - builds of the same files in two folders give the same bytes;
#   - the SBOM names every module that is linked;
#   - the licences of all that is linked, here and in the examples, are on our list.
#
#   supplychain.sh         all checks; both builds share Go's cache
#   supplychain.sh -fresh  the second build compiles everything again, from an empty cache
#   supplychain.sh -binary the builds alone
#   supplychain.sh -sbom F writes the SBOM of nodeproxy, as its image has it, to file F
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=hack/tools.sh
source hack/tools.sh

ALLOWED=Apache-2.0,BSD-2-Clause,BSD-3-Clause,ISC,MIT

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# copy FOLDER copies the files that git has or would add, but not git's own: a binary
# names its commit if it is there.
copy() {
  mkdir -p "$1"
  if git rev-parse --git-dir >/dev/null 2>&1; then
    git ls-files -z --cached --others --exclude-standard --deduplicate | while IFS= read -r -d '' file; do
      [ ! -e "$file" ] || printf '%s\0' "$file"
    done | tar --null -T - -c | tar -x -C "$1"
  else
    tar -c . | tar -x -C "$1"
  fi
}

reproducible() {
  copy "$work/one"
  copy "$work/another/folder"
  "$work/one/node/nodeproxy/deploy/build.sh" "$work/nodeproxy"
  mkdir "$work/tmp"
  (
    if [ "$1" = -fresh ]; then
      export GOCACHE="$work/cache"
    fi
    umask 077
    TMPDIR="$work/tmp" "$work/another/folder/node/nodeproxy/deploy/build.sh" "$work/nodeproxy.2"
  )
  cmp "$work/nodeproxy" "$work/nodeproxy.2"
  sha256sum <"$work/nodeproxy"
}

# linked prints the path of each module in a binary, but for ours.
linked() {
  go version -m "$1" | awk '$1 == "dep" && $2 !~ "^github.com/serviceplane/" { print $2 }'
}

# sbom BINARY FILE has no serial number and no time, so a binary has one SBOM.
sbom() {
  "$SUPPLYCHAIN/cyclonedx-gomod" bin -json -std -noserial -notimestamp -output "$2" \
    -version "$(git describe --tags --always --dirty 2>/dev/null || echo unknown)" "$1"
  linked "$1" | while read -r module; do
    grep -qF "\"name\": \"$module\"" "$2" || { echo "the SBOM does not name $module"; exit 1; }
  done
}

# licences BINARY. A tool that finds no packages finds no fault either, so each linked
# module must be in its report.
licences() {
  local module modules
  printf '{{range .}}{{.Name}}\n{{end}}' >"$work/names"
  "$SUPPLYCHAIN/go-licenses" report ./node/nodeproxy/cmd/nodeproxy --template "$work/names" >"$work/licences" 2>"$work/log" || { cat "$work/log"; exit 1; }
  linked "$1" >"$work/linked"
  while read -r module; do
    grep -qE "^$module(/|\$)" "$work/licences" || { echo "the licence of $module was not found"; exit 1; }
  done <"$work/linked"
  modules="$(wc -l <"$work/linked")"
  for folder in . node/nodeproxy examples examples/gateway; do # ours have the LICENSE of the repository
    (cd "$folder" && GOWORK=off "$SUPPLYCHAIN/go-licenses" check ./... --ignore github.com/serviceplane/serviceplane --allowed_licenses="$ALLOWED" >"$work/log" 2>&1) ||
      { grep -v 'non-Go code' "$work/log"; exit 1; }
  done
  echo "the licences of $modules modules in nodeproxy, and of all others that packages here link, are among $ALLOWED"
}

if [ "${1:-}" = -binary ]; then
  reproducible ''
  exit 0
fi
need_supplychain
if [ "${1:-}" = -sbom ]; then
  node/nodeproxy/deploy/build.sh "$work/nodeproxy"
  sbom "$work/nodeproxy" "$2"
  exit 0
fi
reproducible "${1:-}"
sbom "$work/nodeproxy" "$work/sbom.json"
echo "the SBOM names all $(linked "$work/nodeproxy" | wc -l) modules"
licences "$work/nodeproxy"
