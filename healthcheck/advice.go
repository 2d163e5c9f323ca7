package healthcheck

import (
	"errors"
	"io/fs"
	"syscall"
)

// advice returns what an operator can do about a failure to listen.
func advice(err error) string {
	switch {
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return "check that the node still has the address"
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		return "raise the limit of open files, or find the program that holds so many"
	case errors.Is(err, fs.ErrPermission):
		return "permit this program to listen on that port"
	default:
		return "stop the program that listens there, or give the Service another healthCheckNodePort"
	}
}
