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
	// Full says that Services is everything, and not only what may have changed.
	Full bool
	// Services may have a health check node port. Without one, Port is 0: the Service
	// had one before, or it is gone.
	Services map[types.NamespacedName]HealthService
	// NodePortAddresses are those of desired.Globals: the family listens on local
	// addresses in them. A /0 stands for all, and empty for none.
	NodePortAddresses []netip.Prefix
}

// HealthService is one Service with a health check node port.
type HealthService struct {
	Port uint16
	// LocalEndpoints is the number of distinct ready endpoints on this node.
	LocalEndpoints int
}

// healthUpdate looks at the Services of a delta only, unless it is full.
func healthUpdate(state *changetracker.State, delta changetracker.Delta, full bool) HealthUpdate {
	u := HealthUpdate{Full: full, Services: map[types.NamespacedName]HealthService{}}
	view := state.For(state.Node())
	if full {
		for name, port := range state.HealthCheckNodePorts() {
			u.Services[name] = HealthService{Port: port, LocalEndpoints: view.LocalReady(name)}
		}
		return u
	}
	for i := range delta.Changes {
		c := &delta.Changes[i]
		name := c.Name.NamespacedName
		if known, ok := u.Services[name]; ok && known.Port != 0 {
			continue // another port of it has told
		}
		now := HealthService{Port: state.HealthCheckNodePort(name)}
		if now.Port != 0 {
			now.LocalEndpoints = view.LocalReady(name)
		}
		if now.Port != 0 || c.Before != nil && c.Before.HealthCheckNodePort != 0 {
			u.Services[name] = now
		}
	}
	return u
}
