package proxiertest

import (
	"context"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

// Scenario is a rule of an engine's author. Conformance checks it after all rules PKT-…, with a new
// Provider.
type Scenario struct {
	// Name is the name of the subtest, such as "ACME-1".
	Name string
	// Config, if not nil, changes the configuration of the Provider.
	Config func(*proxier.Config)
	// Services and Slices are programmed before Check: see Service and Slice.
	Services []*v1.Service
	Slices   []*discovery.EndpointSlice
	// Check sends packets, and reports what is wrong. It may give events to the Provider, and call
	// Sync.
	Check func(ctx context.Context, t *testing.T, network *Topology, p proxier.Provider)
}
