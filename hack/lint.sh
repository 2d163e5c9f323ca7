#!/usr/bin/env bash
# Runs the linters, and brings them: they check the format, and what go vet does.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=hack/tools.sh
source hack/tools.sh
need_golangci_lint
if [ $# = 0 ]; then
  (cd examples/gateway && GOWORK=off "$GOLANGCI_LINT" run --allow-serial-runners ./...)
  set -- ./... ./examples/... ./node/nodeproxy/...
fi
"$GOLANGCI_LINT" run --allow-serial-runners "$@"
