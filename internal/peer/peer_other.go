//go:build !linux

package peer

import "net"

// IsTrusted trusts the mode of the socket's file.
func IsTrusted(net.Conn) bool { return true }
