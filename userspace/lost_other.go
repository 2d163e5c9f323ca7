//go:build !linux

package userspace

import (
	"syscall"

	"github.com/serviceplane/serviceplane/desired"
)

// kernelState is nothing: this system is not asked.
type kernelState struct{}

func stateOf(syscall.RawConn, desired.Protocol) kernelState { return kernelState{} }
