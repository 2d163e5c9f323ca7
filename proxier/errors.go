package proxier

import (
	"errors"
	"fmt"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Errors to be told apart with errors.Is.
var (
	// ErrInvalidConfig is in every error of Config.Validate.
	ErrInvalidConfig = errors.New("invalid configuration")
	// ErrNotSupported says that this platform or kernel cannot do it.
	ErrNotSupported = errors.New("not supported")
	// ErrContested says that a sync waits, because somebody keeps changing our
	// kernel objects; see ConditionContested.
	ErrContested = errors.New("somebody else keeps changing our objects")
	// ErrPermission says that the process lacks a privilege, CAP_NET_ADMIN in the
	// network namespace for the kernel engines.
	ErrPermission = errors.New("not permitted")
)

// UnsupportedError says which feature the kernel lacks, and where to get it.
type UnsupportedError struct {
	Feature string // e.g. "nf_tables expression fib"
	Hint    string // e.g. "load module nft_fib_ipv4, or enable CONFIG_NFT_FIB_IPV4"
	Err     error  // what the kernel said
}

// Error names the feature, the cause and the hint.
func (e *UnsupportedError) Error() string {
	return fmt.Sprintf("%s is missing: %v (%s)", e.Feature, e.Err, e.Hint)
}

// Unwrap returns what the kernel said.
func (e *UnsupportedError) Unwrap() error { return e.Err }

// Is makes every UnsupportedError an ErrNotSupported.
func (e *UnsupportedError) Is(target error) bool { return target == ErrNotSupported }

// ServiceError says that one service port is not programmed as it should be. All
// others are not affected.
type ServiceError struct {
	Name changetracker.ServicePortName
	Err  error // the cause
	// Partial says that it may not be as it was before either.
	Partial bool
}

// Error names the service port and the cause.
func (e *ServiceError) Error() string {
	return fmt.Sprintf("service port %s (%s): %v", e.Name, e.Name.Protocol, e.Err)
}

// Unwrap returns the cause.
func (e *ServiceError) Unwrap() error { return e.Err }
