#!/usr/bin/env bash
# chaos.sh KERNEL ARGUMENT… runs internal/chaos in a virtual machine: there the kernel has
# IPVS, and the clock and the memory of a process may be changed:
#   hack/vm/chaos.sh 6.1 -engine=ipvs -for=10m
# BEFORE is the commit of the version before; the default is HEAD~1.
set -euo pipefail
cd "$(dirname "$0")/../.."

kernel="$1"
shift
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir "$work/tree"
git archive "${BEFORE:-HEAD~1}" | tar -x -C "$work/tree"
node/nodeproxy/deploy/build.sh "$work/nodeproxy"
before=("$work"/tree/{node/,}nodeproxy/deploy/build.sh) # where it was once
"$(ls -d "${before[@]}" 2>/dev/null)" "$work/nodeproxy.before"
SERVICEPLANE_VM="$(hack/vm/base.sh "$kernel")"
export SERVICEPLANE_VM SERVICEPLANE_VM_FILES="$work/nodeproxy $work/nodeproxy.before"
export SERVICEPLANE_REQUIRE_KERNEL=1 SERVICEPLANE_VM_TIMEOUT="${SERVICEPLANE_VM_TIMEOUT:-7200}" CGO_ENABLED=0
go test -count=1 -v -timeout 2h -exec "$PWD/hack/vm/run" ./internal/chaos "$@"
