package hybrid

import (
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// placement is which members have the frontends of each kind of a service port, a bit for each member.
// Several have them while they move. A service port without frontends is placed as if it had a ClusterIP.
// Kind 0 is for members that may have anything: they have failed.
type placement [desired.NodePort + 1]uint8

const mostMembers = 8 // bits

func bit(member int) uint8 { return 1 << member }

// kindsOf returns the kinds of the frontends of a service port.
func kindsOf(s *desired.Service) []desired.Kind {
	if len(s.Frontends) == 0 {
		return []desired.Kind{desired.ClusterIP}
	}
	kinds := make([]desired.Kind, len(s.Frontends))
	for i := range s.Frontends {
		kinds[i] = s.Frontends[i].Kind
	}
	return kinds
}

// placementOf returns the chosen members of a service port, which may be nil.
func (h *engine) placementOf(s *desired.Service) (p placement) {
	if s == nil {
		return p
	}
	for _, kind := range kindsOf(s) {
		if p[kind] == 0 {
			p[kind] = bit(h.index(s, kind))
		}
	}
	return p
}

// index returns the chosen member of the frontends of a kind.
func (h *engine) index(s *desired.Service, kind desired.Kind) int {
	name := h.choose(s, kind)
	return max(0, slices.IndexFunc(h.members, func(e Member) bool { return e.Name == name }))
}

// has reports whether a member has, or may have, something.
func (p placement) has(member int) bool {
	return slices.ContainsFunc(p[:], func(members uint8) bool { return members&bit(member) != 0 })
}

// onlyWhere returns the placement without the kinds that another one does not have.
func (p placement) onlyWhere(o placement) placement {
	for kind := range p {
		if o[kind] == 0 {
			p[kind] = 0
		}
	}
	return p
}

// or returns both placements.
func (p placement) or(o placement) placement {
	for kind := range p {
		p[kind] |= o[kind]
	}
	return p
}

// with is a placement together with an earlier one: while frontends move, both count.
type with struct{ was, now placement }

// leavers are the members that give up frontends that others get.
func (w with) leavers() (members uint8) {
	for kind := range w.was {
		members |= w.was[kind] &^ w.now[kind]
	}
	return members
}

// of returns a service port with the frontends that a member has in one of both placements; nil if it has none.
func (w with) of(s *desired.Service, member int) *desired.Service {
	if s == nil {
		return nil
	}
	here := func(kind desired.Kind) bool { return (w.was[kind]|w.now[kind])&bit(member) != 0 }
	kinds := kindsOf(s)
	switch {
	case !slices.ContainsFunc(kinds, here):
		return nil
	case !slices.ContainsFunc(kinds, func(kind desired.Kind) bool { return !here(kind) }):
		return s
	}
	part := *s
	part.Frontends = slices.DeleteFunc(slices.Clone(s.Frontends), func(f desired.Frontend) bool { return !here(f.Kind) })
	return &part
}

// part returns what a change is for a member that had the frontends of an earlier placement.
func (w with) part(c *desired.Change, member int, had placement, update *desired.Update) desired.Change {
	part := *c
	part.Before, part.After = with{was: had}.of(c.Before, member), w.of(c.After, member)
	if !had.has(member) && !update.Full {
		part.Source = asNew(c, update.Now)
	}
	return part
}

// asNew returns the change of a new service port, for one that a member gets: it has none of its endpoints.
func asNew(c *desired.Change, now *desired.Resolved) *changetracker.PortChange {
	source := &changetracker.PortChange{Name: c.Name, After: c.After.Port}
	if now != nil {
		source.Added = now.View().State().Endpoints(c.Name)
	}
	return source
}
