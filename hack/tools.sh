#!/usr/bin/env bash
# Installs the tools of the other scripts, at fixed versions, into a cache. Source
# this file; it sets GOLANGCI_LINT, APIDIFF and SUPPLYCHAIN to the paths of the tools.
set -euo pipefail

GOLANGCI_LINT_VERSION=v2.15.0
APIDIFF_VERSION=v0.0.0-20261014143641-f0251eb4aa3e

# The Go version is part of the path: neither tool can read code of a newer Go than
# the one it was built with.
TOOLS="${XDG_CACHE_HOME:-$HOME/.cache}/serviceplane/bin/$(go env GOVERSION)"
GOLANGCI_LINT="$TOOLS/$GOLANGCI_LINT_VERSION/golangci-lint"
APIDIFF="$TOOLS/$APIDIFF_VERSION/apidiff"
# A folder, with a name of its own for the versions that hack/supplychain pins.
SUPPLYCHAIN="$TOOLS/supplychain-$(cksum <"$(dirname "${BASH_SOURCE[0]}")/supplychain/go.sum" | cut -d' ' -f1)"

need_golangci_lint() {
  if [ ! -x "$GOLANGCI_LINT" ]; then
    echo "installing golangci-lint $GOLANGCI_LINT_VERSION, which takes some minutes"
    GOBIN="$(dirname "$GOLANGCI_LINT")" go install "github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$GOLANGCI_LINT_VERSION"
  fi
  "$GOLANGCI_LINT" version
}

need_apidiff() {
  if [ ! -x "$APIDIFF" ]; then
    echo "installing apidiff $APIDIFF_VERSION"
    GOBIN="$(dirname "$APIDIFF")" go install "golang.org/x/exp/cmd/apidiff@$APIDIFF_VERSION"
  fi
}

need_supplychain() {
  if [ ! -x "$SUPPLYCHAIN/go-licenses" ]; then
    echo "installing the tools of hack/supplychain"
    GOWORK=off go build -C "$(dirname "${BASH_SOURCE[0]}")/supplychain" -o "$SUPPLYCHAIN/" tool
  fi
}

# install_apt PACKAGE… installs Debian packages.
install_apt() {
  echo "installing $*"
  apt-get update -q
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"
}

# need_apt COMMAND PACKAGE installs a Debian package unless its command is there.
need_apt() {
  if ! command -v "$1" >/dev/null; then
    install_apt "$2"
  fi
  "$1" --version 2>/dev/null || true # busybox has no such option
}

# need_nginx installs nginx and its stream module if they are missing, but starts no
# service, neither now nor at the next boot.
need_nginx() (
  policy=/usr/sbin/policy-rc.d
  if [ -e /usr/lib/nginx/modules/ngx_stream_module.so ] && command -v nginx >/dev/null; then
    nginx -v
    exit 0
  fi
  if [ ! -e "$policy" ]; then # 101 forbids packages to start services
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
  fi
  if command -v nginx >/dev/null; then
    install_apt libnginx-mod-stream
    exit 0
  fi
  install_apt nginx libnginx-mod-stream
  if command -v systemctl >/dev/null; then
    systemctl disable -q nginx
  fi
)
