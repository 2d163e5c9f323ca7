//go:build !linux

package userspace

import (
	"io"
	"net"
)

// copyAll copies one direction to its end.
func copyAll(to, from net.Conn) error {
	_, err := io.Copy(to, from)
	return err
}
