package changetracker

import (
	"errors"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// EndpointChangeTracker tracks EndpointSlices. In a Tracker it shares one State
// with the Services; on its own, the States that it makes have endpoints only.
type EndpointChangeTracker struct {
	store *store
	from  string // the Source
}

// NewEndpointChangeTracker returns a tracker of EndpointSlices alone. For errors
// see New.
func NewEndpointChangeTracker(o Options) (*EndpointChangeTracker, error) {
	s, err := newStore(o)
	if err != nil {
		return nil, err
	}
	s.endpointsOnly = true
	return &EndpointChangeTracker{store: s}, nil
}

// Apply is Tracker.Apply.
func (t *EndpointChangeTracker) Apply(family v1.IPFamily, fn func(Step) (failed []ServicePortName, err error)) error {
	return t.store.apply(family, fn)
}

// EndpointSliceUpdate takes over a slice as it is now, or drops it. A slice is
// known by its own name: one whose label names another Service than before moves
// there. changed says whether an Apply sees a difference to what it would have
// seen before the call.
//
// Of several records of one address and port within a Service the same one counts
// always: one that does not terminate before one that does, one that is ready before
// one that is not, one that serves before one that does not, then that of the newest
// slice, then that of the slice whose name comes first. Within a slice the greater
// weight comes after the conditions. The record that counts brings its weight: weights
// are not added up.
//
// Endpoints of ports that the Service does not have wait, and are no change, until
// it has them.
//
// The slice is neither changed nor kept. Values that make no sense are set aside
// one by one; see Tracker.Problems.
func (t *EndpointChangeTracker) EndpointSliceUpdate(slice *discovery.EndpointSlice, remove bool) (changed bool) {
	return t.store.updateSlice(t.from, slice, remove)
}

// Set takes over endpoints that do not come from an EndpointSlice, in the place
// of those that an earlier Set gave that service port; without any it removes
// them. They live beside those of the slices of the same Service, which win where
// both have an equally good record of an address. Endpoints of a family that is
// not tracked are left out. One without a Node is local to no node. Conditions are taken as
// given: an endpoint with none of Ready, Serving and Terminating is an error, because it
// could get no traffic.
//
// Set keeps canonical copies. When it returns an error, which names every invalid
// value, nothing has changed. For changed see EndpointSliceUpdate.
func (t *EndpointChangeTracker) Set(name ServicePortName, endpoints ...Endpoint) (changed bool, err error) {
	canonical, err := t.store.canonicalEndpoints(t.from, name, endpoints)
	if err != nil {
		return false, fmt.Errorf("set endpoints of %s: %w", name, err)
	}
	return t.store.setEndpoints(t.from, name, canonical), nil
}

// canonicalEndpoints makes canonical copies of hand-built endpoints, sorted by address. The
// error names every invalid value.
func (s *store) canonicalEndpoints(from string, name ServicePortName, endpoints []Endpoint) (canonical perFamily[[]Endpoint], err error) {
	var faults []error
	if !validProtocol(name.Protocol) {
		faults = append(faults, fmt.Errorf("protocol: invalid value %q", name.Protocol))
	}
	for _, e := range endpoints {
		if err := e.canonicalise(&s.options); err != nil {
			faults = append(faults, err)
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
	return canonical, errors.Join(faults...)
}
