package changetracker

import (
	"errors"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// ServiceChangeTracker tracks Services. In a Tracker it shares one State with the endpoints;
// on its own, its States have service ports only.
type ServiceChangeTracker struct {
	store *store
	from  string // the Source
	lent  bool   // see Tracker.Lend
}

// NewServiceChangeTracker returns a tracker of Services only. For errors see New.
func NewServiceChangeTracker(o Options) (*ServiceChangeTracker, error) {
	s, err := newStore(o)
	if err != nil {
		return nil, err
	}
	return &ServiceChangeTracker{store: s}, nil
}

// Apply is Tracker.Apply.
func (t *ServiceChangeTracker) Apply(family v1.IPFamily, fn func(Delta) (failed []ServicePortName, err error)) error {
	return t.store.applyFor(t.lent, family, Part{}, fn)
}

// Update stores the current version of a Service. With a nil current it removes the Service
// that previous names; previous is not used otherwise, because the tracker holds the last
// version itself. changed reports whether the next Apply sees a different State than without the
// call.
//
// The Service is neither changed nor kept. Invalid values are set aside one by one; see
// Tracker.Problems.
func (t *ServiceChangeTracker) Update(previous, current *v1.Service) (changed bool) {
	named := current
	if current == nil {
		named = previous
	}
	if named == nil {
		return false
	}
	name := types.NamespacedName{Namespace: named.Namespace, Name: named.Name}
	return t.store.updateService(t.from, name, current)
}

// Set stores service ports that do not come from an API object. They replace all service ports
// of that Service in both families. Each must have the given name and a ClusterIP, another VIP
// or a node port. Those of a family that is not tracked are ignored. Set stores canonical
// copies. The error names every invalid value; nothing has changed then.
func (t *ServiceChangeTracker) Set(name types.NamespacedName, ports ...ServicePort) (changed bool, err error) {
	canonical, err := canonicalPorts(name, ports)
	if err != nil {
		return false, fmt.Errorf("set Service %s: %w", name, err)
	}
	return t.store.setService(t.from, name, canonical), nil
}

// canonicalPorts returns canonical copies of the hand-built service ports of a Service, sorted
// by name. The error names every invalid value.
func canonicalPorts(name types.NamespacedName, ports []ServicePort) (canonical perFamily[[]*ServicePort], err error) {
	var errs []error
	for i := range ports {
		p := ports[i].clone()
		if err := p.canonicalise(len(ports)); err != nil {
			errs = append(errs, fmt.Errorf("service port %s: %w", p.Name, err))
			continue
		}
		if p.Name.NamespacedName != name {
			errs = append(errs, fmt.Errorf("service port %s: not of Service %s", p.Name, name))
		}
		family, _ := familyIndex(p.Family)
		canonical[family] = append(canonical[family], p)
	}
	for _, list := range canonical {
		slices.SortFunc(list, func(a, b *ServicePort) int { return a.Name.Compare(b.Name) })
		for i := 1; i < len(list); i++ {
			if list[i].Name == list[i-1].Name {
				errs = append(errs, fmt.Errorf("service port %s: listed twice", list[i].Name))
			}
		}
	}
	return canonical, errors.Join(errs...)
}

// Delete removes all service ports of a Service, whether Update or Set stored them. For
// changed see Update.
func (t *ServiceChangeTracker) Delete(name types.NamespacedName) (changed bool) {
	return t.store.updateService(t.from, name, nil)
}
