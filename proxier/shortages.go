package proxier

import (
	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// shortage counts service ports by the policy that is Local.
type shortage struct{ internal, external int }

// shortages knows the service ports with endpoints elsewhere only, whose traffic
// policy binds them to this node. It is owned by the goroutine that syncs the
// family.
type shortages struct {
	byName map[changetracker.ServicePortName]shortage
	count  shortage
}

func (s *shortages) update(u *desired.Update) {
	if u.Full || s.byName == nil {
		*s = shortages{byName: map[changetracker.ServicePortName]shortage{}}
	}
	for name := range u.Removed() {
		s.set(name, shortage{})
	}
	for service := range u.Services() {
		s.set(service.Name, shortageOf(service))
	}
}

func (s *shortages) set(name changetracker.ServicePortName, now shortage) {
	before := s.byName[name]
	s.count.internal += now.internal - before.internal
	s.count.external += now.external - before.external
	if now == (shortage{}) {
		delete(s.byName, name)
		return
	}
	s.byName[name] = now
}

// shortageOf counts a service port once for each policy, however many frontends
// it has.
func shortageOf(service *desired.Service) (n shortage) {
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
