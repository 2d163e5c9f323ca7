package changetracker

import v1 "k8s.io/api/core/v1"

// Versions say how far the inputs of a Tracker are known or applied. Each is what Heard was
// told, usually a resourceVersion of the API server; empty means unknown. The Tracker does not
// interpret them.
type Versions struct{ Services, EndpointSlices string }

// Heard tells the Tracker that it has received every change of an Input up to a version.
// InputServices and InputEndpointSlices have versions, those of other Inputs are ignored. It is
// no change.
func (t *Tracker) Heard(input Input, version string) {
	s := t.store
	s.mu.Lock()
	defer s.mu.Unlock()
	switch input {
	case InputServices:
		s.heard.Services = version
	case InputEndpointSlices:
		s.heard.EndpointSlices = version
	default:
		return
	}
	for _, f := range s.families {
		if f != nil {
			f.heard(s.heard)
		}
	}
}

// Applied returns up to which versions everything in a family was applied, but for service ports
// that failed. It is zero before the first Apply that succeeds, and for a family that is not
// tracked. Versions that changed nothing count as applied at once.
func (t *Tracker) Applied(family v1.IPFamily) Versions {
	index, ok := familyIndex(family)
	if !ok || t.store.families[index] == nil {
		return Versions{}
	}
	t.store.mu.Lock()
	defer t.store.mu.Unlock()
	return t.store.families[index].applied
}

// heard takes over the Versions if nothing is to be applied.
func (f *family) heard(v Versions) {
	if f.upToDate && len(f.dirty) == 0 && f.fullWanted == f.fullDone {
		f.applied = v
	}
}
