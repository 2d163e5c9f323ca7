package proxier

import (
	"context"
	"net/netip"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Health answers at the health check node ports of Services. Load balancers probe these
// ports to learn which nodes have endpoints.
type Health interface {
	// Update is called after each sync that programmed something. It must not block. Calls
	// for both families may overlap.
	Update(family v1.IPFamily, update HealthUpdate)
	// Run listens and answers until ctx ends, and returns nil after all of its goroutines
	// have ended. status is the Provider's.
	Run(ctx context.Context, status func() Status) error
	// Conditions reports the ports that it currently cannot listen on. They become part of
	// Status, so it must not call status.
	Conditions() []Condition
}

// HealthUpdate describes the health check node ports that a sync changed in one family.
type HealthUpdate struct {
	// Full means that Ports lists all Services with such a port, not only changed ones.
	Full bool
	// Ports are the health check node ports of the Services that may have changed; 0 for a
	// Service that has lost its port.
	Ports map[types.NamespacedName]uint16
	// LocalEndpoints counts the distinct ready endpoints on this node, for the Services in
	// Ports. A missing Service has none.
	LocalEndpoints map[types.NamespacedName]int
	// NodePortAddresses is that of desired.Globals: the family listens on local
	// addresses in these ranges. A /0 means all addresses, an empty list none.
	NodePortAddresses []netip.Prefix
}

// healthUpdate returns the update for the Services of a delta, or for all if it is full.
func healthUpdate(state *changetracker.State, delta changetracker.Delta, full bool) HealthUpdate {
	u := HealthUpdate{Full: full}
	view := state.For(state.Node())
	if full {
		for name, port := range state.HealthCheckNodePorts() {
			u.set(name, port, view)
		}
		return u
	}
	for i := range delta.Changes {
		c := &delta.Changes[i]
		name := c.Name.NamespacedName
		if u.Ports[name] != 0 {
			continue // set for another service port of the same Service
		}
		port := state.HealthCheckNodePort(name)
		if port != 0 || c.Before != nil && c.Before.HealthCheckNodePort != 0 {
			u.set(name, port, view)
		}
	}
	return u
}

func (u *HealthUpdate) set(name types.NamespacedName, port uint16, view changetracker.View) {
	if u.Ports == nil {
		u.Ports, u.LocalEndpoints = map[types.NamespacedName]uint16{}, map[types.NamespacedName]int{}
	}
	u.Ports[name] = port
	if port == 0 {
		return
	}
	if local := view.LocalReady(name); local > 0 {
		u.LocalEndpoints[name] = local
	}
}
