#!/usr/bin/env bash
# Runs proofs: what hack/test.sh does not prove, or only in part. Without arguments it lists them;
# see internal/guard/prove for the rest. Each proof installs what it needs.
set -euo pipefail
cd "$(dirname "$0")/.."
exec go run ./internal/guard/prove "$@"
