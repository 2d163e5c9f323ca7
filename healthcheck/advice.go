package healthcheck

import (
	"errors"
	"io/fs"
	"syscall"
)

// advice says what an operator can do about an address that cannot be listened on.
func advice(err error) string {
	switch {
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return "the node seems to have lost the address"
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		return "raise the limit of open files, or find out who holds so many"
	case errors.Is(err, fs.ErrPermission):
		return "let this program listen there"
	default:
		return "end the program that listens there, or give the Service another healthCheckNodePort"
	}
}
