package desired

import (
	"cmp"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
)

// claim is the claim of a service port to a frontend. It decides if several service ports have
// the same frontend.
type claim struct {
	Kind Kind
	Name changetracker.ServicePortName
	// Created and UID are those of the Service; zero if unknown.
	Created time.Time
	UID     types.UID
}

func claimOf(p *changetracker.ServicePort, kind Kind) claim {
	return claim{Kind: kind, Name: p.Name, Created: p.CreationTimestamp, UID: p.UID}
}

// compare orders the claims to one Key; the first one gets it: see Resolved.
func (c claim) compare(o claim) int {
	return cmp.Or(cmp.Compare(c.Kind, o.Kind), c.compareAge(o))
}

// yieldsTo reports whether a claim to a VIP that is an address of the node, and accepts node
// ports, loses against another service port's claim to the node port of the same number. The
// older Service wins. The kind does not matter, except that a ClusterIP always wins.
func (c claim) yieldsTo(nodePort claim) bool {
	return c.Kind != ClusterIP && c.Name != nodePort.Name && nodePort.compareAge(c) < 0
}

func (c claim) compareAge(o claim) int {
	if unknown := c.Created.IsZero(); unknown != o.Created.IsZero() {
		if unknown {
			return 1
		}
		return -1
	}
	return cmp.Or(c.Created.Compare(o.Created), cmp.Compare(c.UID, o.UID), c.Name.Compare(o.Name))
}
