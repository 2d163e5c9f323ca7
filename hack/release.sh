#!/usr/bin/env bash
# Checks what the tags of a release need, and prints the commands of the release. It makes no tag
# and pushes nothing.
#
#   release.sh VERSION         such as v0.1.0; as root. The gate and the proofs take most of a day
#   release.sh -quick VERSION  leaves out the gate and the proofs, says so, and fails for that reason
#
# A release has two tags. The library comes first: VERSION. Then node/nodeproxy/VERSION is a commit
# on top, in which go.mod of nodeproxy requires that library and replaces nothing: go install refuses
# a module with a replace directive. The commit is not on main. The examples have no tags.
set -euo pipefail
cd "$(dirname "$0")/.."

quick=''
if [ "${1:-}" = -quick ]; then
  quick=yes
  shift
fi
if [[ ! "${1:-}" =~ ^v?[0-9]+\.[0-9]+\.[0-9]+$ ]]; then
  sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
version="v${1#v}"
library="$(GOWORK=off go list -m)"
root="$PWD"
# These proofs are left out: the gate runs here anyway, the API is a check of its own, and kernel-…
# run what depends on the kernel. Planted faults and bugs test the tests.
left_out='gate-busy|api|kernels-all|planted-faults|bugs-.*'

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# check NAME COMMAND… runs a command in a subshell that ends at its first failure. All checks run,
# also after one has failed.
failed=()
check() {
  local name="$1" status
  shift
  printf '\n== %s\n' "$name"
  set +e
  (
    set -e
    "$@"
  )
  status=$?
  set -e
  [ "$status" = 0 ] || failed+=("$name")
}

fail() {
  printf '%s\n' "$1" >&2
  exit 1
}

new_version() {
  local tag last
  for tag in "$version" "node/nodeproxy/$version"; do
    if git rev-parse -q --verify "refs/tags/$tag" >/dev/null; then
      fail "the tag $tag exists: choose a newer version"
    fi
  done
  last="$(git tag --list 'v[0-9]*' | sort -V | tail -n 1)"
  [ "$(printf '%s\n' "$last" "$version" | sort -V | tail -n 1)" = "$version" ] || fail "$version is older than the last release, $last: choose a newer version"
  echo "the last release: ${last:-none}"
}

clean_main() {
  local changes
  [ "$(git symbolic-ref -q --short HEAD)" = main ] || fail 'HEAD is not the branch main: switch to it'
  changes="$(git status --porcelain)"
  [ -z "$changes" ] || fail "the tree has changes that are not committed: $changes"
  git log -1 --oneline
}

proofs() {
  local names
  mapfile -t names < <(hack/prove.sh | awk 'NR > 1 { print $1 }' | grep -vxE "$left_out")
  echo "${names[*]}"
  hack/prove.sh "${names[@]}"
}

changelog() {
  local first
  first="$(grep -m 1 '^## ' CHANGELOG.md)"
  [[ "$first" =~ ^"## $version — "20[0-9]{2}-[0-9]{2}-[0-9]{2}$ ]] || fail "CHANGELOG.md begins with \"$first\", want \"## $version — YYYY-MM-DD\""
  echo "$first"
}

# documents checks versions in documents and manifests: ours is this one, or the word VERSION; those
# of Go and of Kubernetes' libraries are those of go.mod.
documents() {
  local others go kubernetes
  others="$(git grep -nE "$library[a-z/]*@v?[0-9]|/(nodeproxy|gateway|prestop|readinessgate):v?[0-9]|$library/(blob|tree|raw|releases)/[^ ]*v[0-9]" -- '*.md' '*.yaml' '*Dockerfile' | grep -vE "${version//./\\.}|@v0\.0\.0 -replace" || true)"
  [ -z "$others" ] || fail "documents name other versions than $version: $others"
  go="$(sed -nE 's/^go ([0-9]+\.[0-9]+).*/\1/p' go.mod)"
  kubernetes="$(sed -nE 's|.*k8s.io/client-go v(0\.[0-9]+).*|\1|p' go.mod)"
  grep -qF "$go today" docs/STABILITY.md || fail "docs/STABILITY.md does not say \"$go today\" of Go, the version in go.mod"
  grep -qF "$kubernetes today" docs/STABILITY.md || fail "docs/STABILITY.md does not say \"$kubernetes today\" of Kubernetes' libraries, the version in go.mod"
  grep -qF "| Go | $go or newer" README.md || fail "README.md does not say that Go is $go or newer"
  echo "versions of this project: $version or VERSION; Go $go, k8s.io $kubernetes"
}

# fresh FOLDER compiles a module outside of the tree that imports each public package of a module here.
fresh() {
  local packages
  packages="$(cd "$1" && GOWORK=off go list -f '{{if ne .Name "main"}}{{.ImportPath}}{{end}}' ./... | grep -vE '/internal(/|$)')"
  mkdir "$work/fresh"
  cp "$1/go.sum" "$work/fresh/"
  (
    cd "$work/fresh"
    export GOWORK=off GOFLAGS=-mod=mod
    go mod init example.com/fresh 2>/dev/null
    go mod edit -require="$library@$version" -replace="$library=$root" \
      -require="$library/node/nodeproxy@$version" -replace="$library/node/nodeproxy=$root/node/nodeproxy"
    printf 'package fresh\n\n' >fresh.go
    sed 's/.*/import _ "&"/' <<<"$packages" >>fresh.go
    go vet ./...
  )
  rm -r "$work/fresh"
  echo "a module of its own imports $(wc -l <<<"$packages") packages of $1"
}

# nodeproxy_tag does to go.mod of nodeproxy what its tag has, in a copy, and builds it beside the library.
nodeproxy_tag() {
  mkdir "$work/tag"
  git archive HEAD | tar -x -C "$work/tag"
  cd "$work/tag"
  (cd node/nodeproxy && go mod edit -dropreplace="$library" -require="$library@$version")
  if grep '^replace' node/nodeproxy/go.mod; then
    fail 'go.mod of nodeproxy replaces more than the library: remove that'
  fi
  go build -o "$work/nodeproxy" ./node/nodeproxy/cmd/nodeproxy
  go version -m "$work/nodeproxy" | grep "$library"
}

image() {
  hack/supplychain.sh -binary
  if docker info >/dev/null 2>&1; then
    docker build -q -f node/nodeproxy/deploy/Dockerfile -t "nodeproxy:$version" .
  else
    echo 'no container daemon: the image was not built; above is the SHA-256 of the binary, the only file in it'
  fi
}

check 'the version is new' new_version
check 'main, without changes' clean_main
check 'CHANGELOG.md' changelog
check 'versions in documents' documents
check 'API against the last release' hack/api.sh
check 'a module that imports the library' fresh .
check 'a module that imports nodeproxy' fresh node/nodeproxy
check 'the tag of nodeproxy' nodeproxy_tag
check 'the image' image
if [ -z "$quick" ]; then
  check 'the gate' hack/test.sh
  check 'the proofs' proofs
fi

if [ "${#failed[@]}" != 0 ]; then
  printf '\n'
  printf 'FAILED: %s\n' "${failed[@]}"
  [ -z "$quick" ] || echo 'not checked: the gate, the proofs'
  exit 1
fi
cat <<EOF

The commands of the release:

git tag -a $version -m 'serviceplane $version' $(git rev-parse HEAD)
git push origin main $version
git switch --detach $version
go -C node/nodeproxy mod edit -dropreplace=$library -require=$library@$version
(cd node/nodeproxy && GOWORK=off go mod tidy)
git commit -am 'nodeproxy requires the library $version'
git tag -a node/nodeproxy/$version -m 'nodeproxy $version'
git push origin node/nodeproxy/$version
docker build -f node/nodeproxy/deploy/Dockerfile -t REGISTRY/nodeproxy:$version . && docker push REGISTRY/nodeproxy:$version
git switch main
EOF
if [ -n "$quick" ]; then
  echo 'not checked: the gate, the proofs. Run this again without -quick before you tag'
  exit 1
fi
