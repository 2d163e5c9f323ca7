#!/usr/bin/env bash
# Runs the linters, and brings them: they check the format, and what go vet does.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=hack/tools.sh
source hack/tools.sh
need_golangci_lint
"$GOLANGCI_LINT" run --allow-serial-runners "${@:-./...}"
if [ $# = 0 ]; then
  cd examples/gateway # a module of its own
  "$GOLANGCI_LINT" run --allow-serial-runners ./...
fi
