package proxier

import (
	"context"
	"net/netip"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// EventHandler is told what exists in a cluster. Its methods may be called from several
// goroutines at once. They only record the event and ask for a sync: they never touch
// the kernel, so an informer's goroutine may call them.
type EventHandler interface {
	OnServiceAdd(service *v1.Service)
	OnServiceUpdate(oldService, service *v1.Service)
	OnServiceDelete(service *v1.Service)
	// OnServiceSynced says that every Service that exists has been added.
	OnServiceSynced()
	OnEndpointSliceAdd(slice *discovery.EndpointSlice)
	OnEndpointSliceUpdate(oldSlice, slice *discovery.EndpointSlice)
	OnEndpointSliceDelete(slice *discovery.EndpointSlice)
	// OnEndpointSlicesSynced says that every EndpointSlice that exists has been
	// added.
	OnEndpointSlicesSynced()
	// OnNodeChange replaces what is known about the node; a change leads to a full
	// sync.
	OnNodeChange(node changetracker.Node)
	// OnServiceCIDRsChanged replaces the ranges that ClusterIPs come from.
	OnServiceCIDRsChanged(cidrs []netip.Prefix)
}

// Provider is a Service proxy for one node, as an embedding program sees it,
// whatever engine it has. All methods may be called from several goroutines at
// once.
//
// Nothing is written to the kernel before both OnServiceSynced and
// OnEndpointSlicesSynced were called, and OnNodeChange where the configuration depends on
// the node (see Config.Node).
type Provider interface {
	EventHandler
	// Run syncs until ctx ends and returns nil after every goroutine of the
	// Provider has ended. The data plane stays as it is. Run may be called once.
	Run(ctx context.Context) error
	// Trigger asks for a sync soon, within the rate limit. It is harmless before,
	// during and after Run.
	Trigger()
	// Sync waits for a sync that starts after the call, and returns its error. Run
	// must be running, or be called soon. Before both were synced it waits for that
	// too: when it returns nil, what was known at the call is in the data plane.
	Sync(ctx context.Context) error
	// Cleanup removes every kernel object of this instance, and nothing else. It
	// does not need Run, and must not be called while Run runs. While another process
	// runs with one of its Names, it does nothing, with ErrInUse.
	Cleanup(ctx context.Context) error
	Status() Status
}
