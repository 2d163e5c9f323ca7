// Package neterror says of what kind an error of the network is, on every operating system. Windows returns numbers of its
// own, which never equal the errors that package syscall has there under the names of POSIX.
package neterror

import (
	"errors"
	"syscall"
)

// Kind is a kind of error.
type Kind uint8

// The kinds.
const (
	// Refused means that nobody listens there. For a UDP socket it is the answer to an earlier datagram, which Go does not
	// tell on Windows.
	Refused Kind = iota
	// Reset means that the other side has ended the connection.
	Reset
	// InUse means that another program has the port.
	InUse
	// NotAvailable means that the node does not have the address, or no free port for the connection.
	NotAvailable
	// NoDescriptors means that the process, or the system, has too many open files.
	NoDescriptors
	// NoMemory means that the system has no memory for the socket or for what it sends.
	NoMemory
)

// Is reports whether an error is of the kind, or wraps one that is.
func (k Kind) Is(err error) bool {
	for _, number := range k.numbers() {
		if errors.Is(err, number) {
			return true
		}
	}
	return false
}

// Numbers of winsock2.h.
const (
	wsaEACCES        = 10013
	wsaEMFILE        = 10024
	wsaEADDRINUSE    = 10048
	wsaEADDRNOTAVAIL = 10049
	wsaECONNRESET    = 10054
	wsaENOBUFS       = 10055
	wsaECONNREFUSED  = 10061
)

// numbers are the numbers of a kind, of all systems: no system has one of another in another meaning.
func (k Kind) numbers() []syscall.Errno {
	switch k {
	case Refused:
		return []syscall.Errno{syscall.ECONNREFUSED, wsaECONNREFUSED}
	case Reset:
		return []syscall.Errno{syscall.ECONNRESET, wsaECONNRESET}
	case InUse:
		return []syscall.Errno{syscall.EADDRINUSE, wsaEADDRINUSE, wsaEACCES} // the last one for ports that Windows has excluded
	case NotAvailable:
		return []syscall.Errno{syscall.EADDRNOTAVAIL, wsaEADDRNOTAVAIL}
	case NoDescriptors:
		return []syscall.Errno{syscall.EMFILE, syscall.ENFILE, wsaEMFILE}
	case NoMemory:
		return []syscall.Errno{syscall.ENOBUFS, syscall.ENOMEM, wsaENOBUFS}
	default:
		return nil
	}
}
