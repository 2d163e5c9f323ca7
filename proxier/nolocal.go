package proxier

import (
	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// noLocal counts service ports whose traffic this node drops because a traffic policy is
// Local and all endpoints are on other nodes.
type noLocal struct{ internal, external int }

// noLocalCounter keeps the counts of a family up to date. It is owned by the goroutine that
// syncs the family.
type noLocalCounter struct {
	byName map[changetracker.ServicePortName]noLocal
	total  noLocal
}

func (c *noLocalCounter) update(u *desired.Update) {
	if u.Full || c.byName == nil {
		*c = noLocalCounter{byName: map[changetracker.ServicePortName]noLocal{}}
	}
	for name := range u.Removed() {
		c.set(name, noLocal{})
	}
	for service := range u.Services() {
		c.set(service.Name, noLocalOf(service))
	}
}

func (c *noLocalCounter) set(name changetracker.ServicePortName, now noLocal) {
	before := c.byName[name]
	c.total.internal += now.internal - before.internal
	c.total.external += now.external - before.external
	if now == (noLocal{}) {
		delete(c.byName, name)
		return
	}
	c.byName[name] = now
}

// noLocalOf counts a service port once per policy, however many frontends it has.
func noLocalOf(service *desired.Service) (n noLocal) {
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
