package userspace

import (
	"errors"
	"fmt"
)

// Why a connection or a UDP flow was not served, or was ended.
var (
	errNotViaPortal  = errors.New("refuse client: it connected to the proxy port directly, and not through a portal")
	errNotAdmitted   = errors.New("refuse client: its source address is not in loadBalancerSourceRanges")
	errNoEndpoints   = errors.New("no endpoints")
	errLeadsBack     = errors.New("the endpoint leads back to this proxy")
	errHoldFull      = errors.New("no endpoints, and too many connections wait for them already: see Hold.MaxPerService")
	errNoDescriptors = errors.New("no free descriptor, and the service port has its fair share: raise the limit of open files")
	// errCut means that the engine closed, or that Config.Drain expired.
	errCut     = errors.New("ended by the proxy")
	errEvicted = fmt.Errorf("%w: other clients need its descriptors: raise the limit of open files", errCut)
)
