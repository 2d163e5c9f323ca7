package changetracker

import (
	"net/netip"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// Events gives the events of a cluster to a Tracker that has no driver: it is the EventHandler that
// informer.Run and informer.Bind want. A Tracker of a proxier.Proxier has one already. Its
// methods may be called from several goroutines at once.
type Events struct {
	Tracker *Tracker
	// ServiceCIDRs gets the ranges of ClusterIPs when they change; nil if nobody needs them.
	ServiceCIDRs func(cidrs []netip.Prefix)
}

// OnServiceAdd takes a Service that is new, or replaces one.
func (e *Events) OnServiceAdd(service *v1.Service) { e.Tracker.Services.Update(nil, service) }

// OnServiceUpdate takes a change of a Service.
func (e *Events) OnServiceUpdate(oldService, service *v1.Service) {
	e.Tracker.Services.Update(oldService, service)
}

// OnServiceDelete takes the end of a Service.
func (e *Events) OnServiceDelete(service *v1.Service) { e.Tracker.Services.Update(service, nil) }

// OnServiceSynced says that all Services were added.
func (e *Events) OnServiceSynced() { e.Tracker.Synced(InputServices) }

// OnEndpointSliceAdd takes a slice that is new, or replaces one.
func (e *Events) OnEndpointSliceAdd(slice *discovery.EndpointSlice) {
	e.Tracker.Endpoints.EndpointSliceUpdate(slice, false)
}

// OnEndpointSliceUpdate takes a change of a slice. It ignores the old one.
func (e *Events) OnEndpointSliceUpdate(_, slice *discovery.EndpointSlice) {
	e.OnEndpointSliceAdd(slice)
}

// OnEndpointSliceDelete takes the end of a slice.
func (e *Events) OnEndpointSliceDelete(slice *discovery.EndpointSlice) {
	e.Tracker.Endpoints.EndpointSliceUpdate(slice, true)
}

// OnEndpointSlicesSynced says that all EndpointSlices were added.
func (e *Events) OnEndpointSlicesSynced() { e.Tracker.Synced(InputEndpointSlices) }

// OnVersion is Tracker.Heard.
func (e *Events) OnVersion(input Input, version string) { e.Tracker.Heard(input, version) }

// OnNodeChange is Tracker.SetNode.
func (e *Events) OnNodeChange(node Node) { e.Tracker.SetNode(node) }

// OnServiceCIDRsChanged calls ServiceCIDRs.
func (e *Events) OnServiceCIDRsChanged(cidrs []netip.Prefix) {
	if e.ServiceCIDRs != nil {
		e.ServiceCIDRs(cidrs)
	}
}
