#!/usr/bin/env bash
# Proves that everything, tests included, compiles on a system that is not Linux, that portable
# packages build on Windows, and engines on another processor. To compile everything for each of
# them would take minutes.
#
#   platforms.sh           all of it
#   platforms.sh -windows  portable packages on Windows alone, as the gate does
set -euo pipefail
cd "$(dirname "$0")/.."

portable=(./changetracker ./desired ./runner ./proxier ./hybrid ./node/healthcheck ./node/programmed ./node/canary ./node/metrics ./node/tracing ./node/debughttp ./userspace ./ebpf ./node/zaplog ./node/packettrace)
GOOS=windows go build "${portable[@]}"
[ "${1:-}" != -windows ] || exit 0
GOOS=darwin go build "${portable[@]}"
GOOS=darwin go vet work
(cd examples/gateway && GOWORK=off GOOS=darwin go vet ./...)
GOOS=windows go vet "${portable[@]}"
GOOS=linux GOARCH=arm64 go vet ./nftables ./internal/nftables ./iptables ./ipvs ./conntrack ./userspace
GOOS=linux GOARCH=s390x go vet ./ebpf # big-endian: no programs
