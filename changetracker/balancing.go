package changetracker

import (
	"fmt"
	"slices"

	"github.com/serviceplane/serviceplane/internal/enum"
)

// Balancing is the load balancing policy of a service port: how an endpoint is chosen for a new
// connection, among those that the traffic policies and the topology allow. Established
// connections, and clients with session affinity, stay with their endpoint. Options.DecorateService
// chooses it; the API has no field for it.
//
// All policies respect the weights of endpoints. An engine that does not have a policy uses
// Random; desired.Traits says which one does.
type Balancing uint8

const (
	// Random draws an endpoint.
	Random Balancing = iota
	// SourceHash chooses by a consistent hash of the client's address: a client gets the same
	// endpoint on every node that has the same endpoints, and when one of N endpoints goes,
	// only about 1/N of the clients get another one.
	SourceHash
	// SourcePortHash is SourceHash over the client's address and port: each connection of a
	// client may get another endpoint, but its packets get the same one on every node.
	SourcePortHash
	// LeastConnections chooses the endpoint with the fewest open connections from this node, in
	// proportion to its weight.
	LeastConnections
)

var balancings = []string{"random", "source-hash", "source-port-hash", "least-connections"} // read-only

// String is "random", "source-hash", "source-port-hash" or "least-connections".
func (b Balancing) String() string { return enum.Name(b, balancings...) }

// MarshalText is String.
func (b Balancing) MarshalText() ([]byte, error) { return []byte(b.String()), nil }

// UnmarshalText is the inverse of MarshalText.
func (b *Balancing) UnmarshalText(text []byte) error {
	i := slices.Index(balancings, string(text))
	if i < 0 {
		return fmt.Errorf("unknown load balancing policy %q: want one of %q", text, balancings)
	}
	*b = Balancing(i)
	return nil
}

// Hashes reports whether the policy is a consistent hash.
func (b Balancing) Hashes() bool { return b == SourceHash || b == SourcePortHash }
