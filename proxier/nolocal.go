package proxier

import "github.com/serviceplane/serviceplane/desired"

// noLocal counts service ports whose traffic this node drops because a traffic policy is
// Local and all endpoints are on other nodes. It is owned by the goroutine that syncs the family.
type noLocal struct{ internal, external int }

func (n *noLocal) update(outcomes []desired.Applied) {
	for i := range outcomes {
		was, is := noLocalOf(outcomes[i].Was), noLocalOf(outcomes[i].Is)
		n.internal += is.internal - was.internal
		n.external += is.external - was.external
	}
}

// noLocalOf counts a service port once per policy, however many frontends it has.
func noLocalOf(service *desired.Service) (n noLocal) {
	if service == nil {
		return noLocal{}
	}
	for i := range service.Frontends {
		switch f := &service.Frontends[i]; {
		case f.Action != desired.Drop:
		case f.Kind == desired.ClusterIP:
			n.internal = 1
		default:
			n.external = 1
		}
	}
	return n
}
