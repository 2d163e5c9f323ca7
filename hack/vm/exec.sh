#!/usr/bin/env bash
# exec.sh KERNEL PACKAGE ARGUMENT… builds a program of this repository and runs it in a
# virtual machine: hack/vm/exec.sh 6.12 ./examples/quickstart -mode ipvs
set -euo pipefail
cd "$(dirname "$0")/../.."

kernel="$1" package="$2"
shift 2
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
CGO_ENABLED=0 go build -o "$work/program" "$package"
SERVICEPLANE_VM="$(hack/vm/base.sh "$kernel")"
export SERVICEPLANE_VM
hack/vm/run "$work/program" "$@"
