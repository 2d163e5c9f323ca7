#!/usr/bin/env bash
# Runs the linters, and brings them.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=hack/tools.sh
source hack/tools.sh
need_golangci_lint
"$GOLANGCI_LINT" run "${@:-./...}"
if [ $# = 0 ]; then
  cd examples/gateway # a module of its own
  "$GOLANGCI_LINT" run ./...
fi
