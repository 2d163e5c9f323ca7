package changetracker

import (
	"errors"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// ServiceChangeTracker tracks Services. In a Tracker it shares one State with the
// endpoints; on its own, the States that it makes have service ports only.
type ServiceChangeTracker struct {
	store *store
	from  string // the Source
}

// NewServiceChangeTracker returns a tracker of Services alone. For errors see New.
func NewServiceChangeTracker(o Options) (*ServiceChangeTracker, error) {
	s, err := newStore(o)
	if err != nil {
		return nil, err
	}
	return &ServiceChangeTracker{store: s}, nil
}

// Apply is Tracker.Apply.
func (t *ServiceChangeTracker) Apply(family v1.IPFamily, fn func(Step) (failed []ServicePortName, err error)) error {
	return t.store.apply(family, fn)
}

// Update takes over a Service as it is now; a nil current says that the one that
// previous names is gone. What is already known of the Service is remembered here,
// so previous matters only then. changed says whether an Apply sees a difference
// to what it would have seen before the call.
//
// The Service is neither changed nor kept. Values that make no sense are set
// aside one by one; see Tracker.Problems.
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

// Set takes over service ports that do not come from an API object, in the place
// of everything known of that Service in both families. Each must bear the given
// name, and something to dial: a ClusterIP, other VIPs, or a node port alone. Those of a
// family that is not tracked are left out. Set keeps canonical copies. When it returns an error,
// which names every invalid value, nothing has changed.
func (t *ServiceChangeTracker) Set(name types.NamespacedName, ports ...ServicePort) (changed bool, err error) {
	canonical, err := canonicalPorts(name, ports)
	if err != nil {
		return false, fmt.Errorf("set Service %s: %w", name, err)
	}
	return t.store.setService(t.from, name, canonical), nil
}

// canonicalPorts makes canonical copies of hand-built service ports of a Service, sorted
// by name. The error names every invalid value.
func canonicalPorts(name types.NamespacedName, ports []ServicePort) (canonical perFamily[[]*ServicePort], err error) {
	var faults []error
	for i := range ports {
		p := ports[i].clone()
		if err := p.canonicalise(); err != nil {
			faults = append(faults, fmt.Errorf("service port %s: %w", p.Name, err))
			continue
		}
		if p.Name.NamespacedName != name {
			faults = append(faults, fmt.Errorf("service port %s: not of Service %s", p.Name, name))
		}
		family, _ := familyIndex(p.Family)
		canonical[family] = append(canonical[family], p)
	}
	for _, list := range canonical {
		slices.SortFunc(list, func(a, b *ServicePort) int { return a.Name.Compare(b.Name) })
		for i := 1; i < len(list); i++ {
			if list[i].Name == list[i-1].Name {
				faults = append(faults, fmt.Errorf("service port %s: listed twice", list[i].Name))
			}
		}
	}
	return canonical, errors.Join(faults...)
}

// Delete removes all service ports of a Service, whether Update or Set brought them. For
// changed see Update.
func (t *ServiceChangeTracker) Delete(name types.NamespacedName) (changed bool) {
	return t.store.updateService(t.from, name, nil)
}
