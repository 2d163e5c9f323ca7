#!/usr/bin/env bash
# Runs the linters, and brings them.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=hack/tools.sh
source hack/tools.sh
need_go golangci-lint github.com/golangci/golangci-lint/v2/cmd/golangci-lint "$GOLANGCI_LINT"
"$TOOLS/golangci-lint" run "${@:-./...}"
