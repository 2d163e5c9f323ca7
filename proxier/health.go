package proxier

import (
	"context"
	"net/netip"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Health answers at the health check node ports of Services: load balancers ask
// there which nodes have endpoints.
type Health interface {
	// Update says what is programmed, after each sync that programmed something. It
	// must not block. Calls for both families may overlap.
	Update(family v1.IPFamily, update HealthUpdate)
	// Run listens and answers until ctx ends, and returns nil after every goroutine
	// of it has ended. status is the Provider's.
	Run(ctx context.Context, status func() Status) error
	// Conditions are what cannot be listened on at the moment. They become part of
	// Status, so it must not call status.
	Conditions() []Condition
}

// HealthUpdate is what a sync changed about health check node ports in one family.
type HealthUpdate struct {
	// Full says that Ports are all that there are, and not only those that may have changed.
	Full bool
	// Ports are the health check node ports of the Services that may have changed. It is 0
	// for one that had a port before.
	Ports map[types.NamespacedName]uint16
	// LocalEndpoints are the numbers of distinct ready endpoints on this node, of the
	// Services in Ports that have one.
	LocalEndpoints map[types.NamespacedName]int
	// NodePortAddresses are those of desired.Globals: the family listens on local
	// addresses in them. A /0 stands for all, and empty for none.
	NodePortAddresses []netip.Prefix
}

// healthUpdate looks at the Services of a delta only, unless it is full.
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
			continue // another port of it has told
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
