#!/usr/bin/env bash
# Runs the linters, and brings them.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=hack/tools.sh
source hack/tools.sh
need_golangci_lint
"$GOLANGCI_LINT" run "${@:-./...}"
