package changetracker

import (
	"errors"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// EndpointChangeTracker tracks EndpointSlices. In a Tracker it shares one State with the
// Services; on its own, its States have endpoints only.
type EndpointChangeTracker struct {
	store *store
	from  string // the Source
	lent  bool   // see Tracker.Lend
}

// NewEndpointChangeTracker returns a tracker of EndpointSlices only. For errors see New.
func NewEndpointChangeTracker(o Options) (*EndpointChangeTracker, error) {
	s, err := newStore(o)
	if err != nil {
		return nil, err
	}
	s.endpointsOnly = true
	return &EndpointChangeTracker{store: s}, nil
}

// Apply is Tracker.Apply.
func (t *EndpointChangeTracker) Apply(family v1.IPFamily, fn func(Delta) (failed []ServicePortName, err error)) error {
	return t.store.applyFor(t.lent, family, Part{}, fn)
}

// EndpointSliceUpdate stores the current version of a slice, or removes the slice. A slice is
// identified by its own name: when its label names another Service than before, it moves
// there. changed reports whether the next Apply sees a different State than without the call.
//
// Several slices of a Service may have the same address and port. The record that counts does
// not depend on the order of events: first one that is not terminating, then one that is
// ready, then one that is serving, then the one in the newest slice, then the one in the slice
// with the first name. Within a slice, the greater weight decides after the conditions. The
// weight is that of the record that counts; weights are not added up.
//
// Endpoints of ports that the Service does not have are kept, but are no change until the
// Service has the port.
//
// The slice is neither changed nor kept. Invalid values are set aside one by one; see
// Tracker.Problems.
func (t *EndpointChangeTracker) EndpointSliceUpdate(slice *discovery.EndpointSlice, remove bool) (changed bool) {
	return t.store.updateSlice(t.from, slice, remove)
}

// Set stores endpoints that do not come from an EndpointSlice. They replace those of the
// previous Set for the service port; no endpoints remove them. They are used together with
// those of the Service's slices, which win where both have an equally good record of an
// address. Endpoints of a family that is not tracked are ignored. An endpoint without a Node
// is local to no node. Conditions are taken as they are: an endpoint with none of Ready,
// Serving and Terminating is an error, because it could get no traffic.
//
// Set stores canonical copies. The error names every invalid value; nothing has changed then.
// For changed see EndpointSliceUpdate.
func (t *EndpointChangeTracker) Set(name ServicePortName, endpoints ...Endpoint) (changed bool, err error) {
	canonical, err := t.store.canonicalEndpoints(t.from, name, endpoints)
	if err != nil {
		return false, fmt.Errorf("set endpoints of %s: %w", name, err)
	}
	return t.store.setEndpoints(t.from, name, canonical), nil
}

// canonicalEndpoints returns canonical copies of hand-built endpoints, sorted by address. The
// error names every invalid value.
func (s *store) canonicalEndpoints(from string, name ServicePortName, endpoints []Endpoint) (canonical perFamily[[]Endpoint], err error) {
	var errs []error
	if !validProtocol(name.Protocol) {
		errs = append(errs, fmt.Errorf("protocol: invalid value %q", name.Protocol))
	}
	for _, e := range endpoints {
		if err := e.canonicalise(&s.options); err != nil {
			errs = append(errs, err)
			continue
		}
		e.Node = qualified(from, e.Node)
		for i, hint := range e.NodeHints {
			e.NodeHints[i] = qualified(from, hint)
		}
		family := addrFamily(e.Addr.Addr())
		canonical[family] = append(canonical[family], e)
	}
	for family := range canonical {
		slices.SortStableFunc(canonical[family], compareByAddr)
	}
	return canonical, errors.Join(errs...)
}
