package proxier

import (
	"context"
	"net/netip"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// EventHandler receives the events of a cluster. Its methods may be called from several
// goroutines at once. They only record the event and request a sync. They never access
// the kernel, so an informer's goroutine may call them.
type EventHandler interface {
	// OnServiceAdd may come for a Service that is known: it replaces it then.
	OnServiceAdd(service *v1.Service)
	OnServiceUpdate(oldService, service *v1.Service)
	// OnServiceDelete needs only the Namespace and Name.
	OnServiceDelete(service *v1.Service)
	// OnServiceSynced is called after every existing Service was added.
	OnServiceSynced()
	// OnEndpointSliceAdd may come for a slice that is known: it replaces it then.
	OnEndpointSliceAdd(slice *discovery.EndpointSlice)
	OnEndpointSliceUpdate(oldSlice, slice *discovery.EndpointSlice)
	// OnEndpointSliceDelete needs only the Namespace and Name.
	OnEndpointSliceDelete(slice *discovery.EndpointSlice)
	// OnEndpointSlicesSynced is called after every existing EndpointSlice was added.
	OnEndpointSlicesSynced()
	// OnVersion says that every event of the Services or of the EndpointSlices up to a version
	// was delivered. It is optional: see FamilyStatus.Versions. The version is the
	// resourceVersion of the API server, or a number of another source that grows.
	OnVersion(input changetracker.Input, version string)
	// OnNodeChange replaces the description of the node; a change causes a full sync.
	OnNodeChange(node changetracker.Node)
	// OnServiceCIDRsChanged replaces the ranges of ClusterIPs.
	OnServiceCIDRsChanged(cidrs []netip.Prefix)
}

// Provider is a Service proxy for one node, whatever its engine. All methods may be called
// from several goroutines at once.
//
// Nothing is written to the kernel before OnServiceSynced and OnEndpointSlicesSynced were
// called, and OnNodeChange if the configuration depends on the node (see Config.Node).
type Provider interface {
	EventHandler
	// Run syncs until ctx ends, and returns nil after all goroutines of the Provider have
	// ended. The data plane stays as it is. Run may be called once.
	Run(ctx context.Context) error
	// Trigger requests a sync as soon as the rate limit allows. It may be called before,
	// during and after Run.
	Trigger()
	// Sync waits for a sync that starts after the call, and returns its error. It needs Run.
	// It also waits for the inputs of the first sync. When it returns nil, all events before
	// the call are programmed, but for the service ports in FamilyStatus.Failed: if that sync was for a part
	// of them only, Sync has waited for further ones. The first one tries again all that failed.
	Sync(ctx context.Context) error
	// Cleanup removes every kernel object of this instance, and nothing else. It
	// does not need Run, and must not be called during Run. While another process
	// uses one of the Names, it does nothing and returns ErrInUse.
	Cleanup(ctx context.Context) error
	// Status returns what the proxy has programmed, and what is wrong.
	Status() Status
	// Sends returns why the node may send new connections to some endpoints: see Proxier.Sends.
	Sends(endpoints ...netip.AddrPort) []Sending
}
