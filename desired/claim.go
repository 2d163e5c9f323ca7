package desired

import (
	"cmp"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Claim is the claim of a service port to a frontend. It decides if several service ports have
// the same frontend.
type Claim struct {
	Kind Kind
	Name changetracker.ServicePortName
	// Created and UID are those of the Service; zero if unknown.
	Created time.Time
	UID     types.UID
}

func claimOf(p *changetracker.ServicePort, kind Kind) Claim {
	return Claim{Kind: kind, Name: p.Name, Created: p.CreationTimestamp, UID: p.UID}
}

// Compare orders the claims to one Key; the first one gets it. The Kind comes first: the API
// server allocates ClusterIPs and only controllers write the status of load balancers, but
// every user can write an external IP. Then the older Service comes first, and one of unknown
// age last. Then the UID and the name decide, so nobody can take a VIP that is in use by
// choosing a name.
func (c Claim) Compare(o Claim) int {
	return cmp.Or(cmp.Compare(c.Kind, o.Kind), c.compareAge(o))
}

// YieldsTo reports whether a claim to a VIP that is an address of the node, and accepts node
// ports, loses against another service port's claim to the node port of the same number. The
// older Service wins. The kind does not matter, except that a ClusterIP always wins.
func (c Claim) YieldsTo(nodePort Claim) bool {
	return c.Kind != ClusterIP && c.Name != nodePort.Name && nodePort.compareAge(c) < 0
}

func (c Claim) compareAge(o Claim) int {
	if unknown := c.Created.IsZero(); unknown != o.Created.IsZero() {
		if unknown {
			return 1
		}
		return -1
	}
	return cmp.Or(c.Created.Compare(o.Created), cmp.Compare(c.UID, o.UID), c.Name.Compare(o.Name))
}
