package proxier

import (
	"errors"
	"fmt"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Errors to test for with errors.Is.
var (
	// ErrInvalidConfig is wrapped by every error of Config.Validate.
	ErrInvalidConfig = errors.New("invalid configuration")
	// ErrNotSupported means that this platform or kernel lacks a feature.
	ErrNotSupported = errors.New("not supported")
	// ErrContested means that a sync waits because another program keeps changing the
	// kernel objects of this instance; see ConditionContested.
	ErrContested = errors.New("repair postponed: another program keeps changing our kernel objects")
	// ErrInUse means that another Provider programs objects with one of the Names (table,
	// chain prefix or device, whatever the engines) in the same network namespace and IP
	// family. It runs in another process, which the error names, or in this one. Syncs fail
	// and are retried until it has ended. Cleanup does nothing while another process holds
	// the names. It does run beside another Provider of the same process: a program that
	// changes its mode ends Run of the old Provider, waits for the first sync of the new
	// one, and then calls Cleanup of the old one.
	ErrInUse = errors.New("names are in use")
	// ErrPermission means that the process lacks a privilege: CAP_NET_ADMIN in the
	// network namespace, for the kernel engines.
	ErrPermission = errors.New("not permitted")
	// ErrNotProgrammed means that an IP family has not been programmed yet, or is not
	// served.
	ErrNotProgrammed = errors.New("nothing is programmed")
	// ErrNotFull is for a caller of Engine.Apply: the first Update of an engine must be full, and so must
	// the Update after an error, and after a change of its Globals unless the engine says otherwise.
	ErrNotFull = errors.New("a full Update is needed: got a partial one")
)

// UnsupportedError names the feature that the kernel lacks, and where to get it.
type UnsupportedError struct {
	Feature string // e.g. "nf_tables expression fib"
	Hint    string // e.g. "load module nft_fib_ipv4, or enable CONFIG_NFT_FIB_IPV4"
	Err     error  // the error of the kernel
}

// Error names the feature, the cause and the hint.
func (e *UnsupportedError) Error() string {
	return fmt.Sprintf("%s is missing: %v (%s)", e.Feature, e.Err, e.Hint)
}

// Unwrap returns the error of the kernel.
func (e *UnsupportedError) Unwrap() error { return e.Err }

// Is makes every UnsupportedError an ErrNotSupported.
func (e *UnsupportedError) Is(target error) bool { return target == ErrNotSupported }

// ServiceError means that one service port is not programmed as desired. Other
// service ports are not affected.
type ServiceError struct {
	Name changetracker.ServicePortName
	Err  error // the cause
	// Partial means that the service port may not be in its previous state either.
	Partial bool
	// Terminal means that trying again is of no use, until the service port changes or a full sync
	// comes: the engine does not have what it asks for.
	Terminal bool
	// Since is the start of the first of the latest consecutive syncs in which the service
	// port failed. The Proxier sets it.
	Since time.Time
}

// Error names the service port and the cause.
func (e *ServiceError) Error() string {
	return fmt.Sprintf("service port %s (%s): %v", e.Name, e.Name.Protocol, e.Err)
}

// Unwrap returns the cause.
func (e *ServiceError) Unwrap() error { return e.Err }

// errNoCause replaces a missing cause in a ServiceError of an engine.
var errNoCause = errors.New("the engine reported no cause")

// failures returns the first failure of each service port in the result of an engine, and their
// names.
func failures(failed []*ServiceError) (first map[changetracker.ServicePortName]*ServiceError, names []changetracker.ServicePortName) {
	for _, e := range failed {
		if e == nil || first[e.Name] != nil {
			continue
		}
		if e.Err == nil {
			e = &ServiceError{Name: e.Name, Err: errNoCause, Partial: e.Partial, Terminal: e.Terminal}
		}
		if first == nil {
			first = map[changetracker.ServicePortName]*ServiceError{}
		}
		first[e.Name] = e
		names = append(names, e.Name)
	}
	return first, names
}
