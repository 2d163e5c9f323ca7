package desired

import (
	"cmp"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Claim is what counts when several service ports ask for one frontend.
type Claim struct {
	Kind Kind
	Name changetracker.ServicePortName
	// Created and UID are the Service's, zero if they are not known.
	Created time.Time
	UID     types.UID
}

func claimOf(p *changetracker.ServicePort, kind Kind) Claim {
	return Claim{Kind: kind, Name: p.Name, Created: p.CreationTimestamp, UID: p.UID}
}

// Compare orders claims to one Key: the first one gets it. The Kind comes first, since
// the API server allots ClusterIPs and only controllers write the status of load
// balancers, while any user can name an external IP. Then the older Service comes, one
// of unknown age last, and then the smaller UID and name: nobody may take a VIP that is in
// use by the choice of a name.
func (c Claim) Compare(o Claim) int {
	return cmp.Or(cmp.Compare(c.Kind, o.Kind), c.compareAge(o))
}

// YieldsTo says whether the claim to a VIP that is an address of the node, and accepts
// node ports, comes after another service port's claim to the node port of the same
// number. The older Service has it; the kind does not matter, except that a ClusterIP wins.
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
