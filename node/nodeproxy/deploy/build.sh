#!/bin/sh
# Builds nodeproxy as the image has it, prints its size: build.sh OUTPUT. GOOS and
# GOARCH choose the platform.
#
# -s -w leave out the symbol table and DWARF. grpcnotrace leaves out golang.org/x/net/trace, whose
# templates call methods by name, so that the linker has to keep every exported method of every type.
set -eu
output=$(realpath -m "$1")
cd "$(dirname "$0")/.."
CGO_ENABLED=0 go build -trimpath -tags=grpcnotrace -ldflags='-s -w' -o "$output" ./cmd/nodeproxy
echo "nodeproxy: $(($(wc -c <"$output") / 1000000)) MB"
