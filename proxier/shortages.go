package proxier

import (
	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// shortages knows the service ports with endpoints elsewhere only, whose traffic
// policy binds them to this node. It is owned by the goroutine that syncs the
// family.
type shortages struct {
	byName map[changetracker.ServicePortName]NoLocalEndpoints
	count  NoLocalEndpoints
}

func (s *shortages) update(u *desired.Update) {
	if u.Full || s.byName == nil {
		*s = shortages{byName: map[changetracker.ServicePortName]NoLocalEndpoints{}}
	}
	for name := range u.Removed() {
		s.set(name, NoLocalEndpoints{})
	}
	for service := range u.Services() {
		s.set(service.Name, shortageOf(service))
	}
}

func (s *shortages) set(name changetracker.ServicePortName, now NoLocalEndpoints) {
	before := s.byName[name]
	s.count.Internal += now.Internal - before.Internal
	s.count.External += now.External - before.External
	if now == (NoLocalEndpoints{}) {
		delete(s.byName, name)
		return
	}
	s.byName[name] = now
}

// shortageOf counts a service port once for each policy, however many frontends
// it has.
func shortageOf(service *desired.Service) (n NoLocalEndpoints) {
	for i := range service.Frontends {
		switch f := &service.Frontends[i]; {
		case f.Action != desired.Drop:
		case f.Kind == desired.ClusterIP:
			n.Internal = 1
		default:
			n.External = 1
		}
	}
	return n
}
