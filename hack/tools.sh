#!/usr/bin/env bash
# Brings the tools that the other scripts need, at fixed versions, into a cache.
# To be sourced; sets TOOLS to their directory.
set -euo pipefail

TOOLS="${XDG_CACHE_HOME:-$HOME/.cache}/serviceplane/bin"
GOLANGCI_LINT=v2.15.0

# need_go NAME MODULE VERSION installs a Go program unless that version is there.
need_go() {
  local program="$TOOLS/$1" marker="$TOOLS/.$1-$3-$(go env GOVERSION)"
  if [ ! -x "$program" ] || [ ! -e "$marker" ]; then
    echo "installing $1 $3"
    mkdir -p "$TOOLS"
    GOBIN="$TOOLS" GOFLAGS='' go install "$2@$3"
    touch "$marker"
  fi
}

# need_apt COMMAND PACKAGE installs a Debian package unless its command is there.
need_apt() {
  if ! command -v "$1" >/dev/null; then
    if [ "$(id -u)" != 0 ]; then
      echo "$1 is missing and only root can install it: apt-get install $2" >&2
      return 1
    fi
    echo "installing $2"
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$2"
  fi
}
