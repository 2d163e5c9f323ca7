package proxier

import (
	"cmp"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// claims settles who gets a VIP and port, or a node port, that several service
// ports ask for: the kind that is named first in the list of kinds, then the
// smaller name. The outcome depends on who asks, not on who came first, so that a
// restart changes nothing. Owned by the family's sync.
type claims struct {
	byKey  map[desired.Key][]claim // sorted, the first one wins
	byName map[changetracker.ServicePortName][]ownClaim
}

type claim struct {
	kind desired.Kind
	name changetracker.ServicePortName
}

type ownClaim struct {
	key  desired.Key
	kind desired.Kind
}

func newClaims() *claims {
	return &claims{byKey: map[desired.Key][]claim{}, byName: map[changetracker.ServicePortName][]ownClaim{}}
}

func (c claim) compare(o claim) int {
	if r := cmp.Compare(c.kind, o.kind); r != 0 {
		return r
	}
	return c.name.Compare(o.name)
}

// update replaces what a service port asks for; s is nil when it is gone. It
// calls moved for every other service port that won or lost a key by that.
func (c *claims) update(name changetracker.ServicePortName, s *desired.Service, moved func(changetracker.ServicePortName)) {
	old := c.byName[name]
	if s != nil && sameClaims(old, s) {
		return
	}
	for _, o := range old {
		c.withdraw(o, name, moved)
	}
	if s == nil {
		delete(c.byName, name)
		return
	}
	now := make([]ownClaim, len(s.Frontends))
	for i := range s.Frontends {
		f := &s.Frontends[i]
		now[i] = ownClaim{key: s.Key(f), kind: f.Kind}
		c.ask(now[i], name, moved)
	}
	c.byName[name] = now
}

func sameClaims(old []ownClaim, s *desired.Service) bool {
	if len(old) != len(s.Frontends) {
		return false
	}
	for i := range s.Frontends {
		f := &s.Frontends[i]
		if old[i] != (ownClaim{key: s.Key(f), kind: f.Kind}) {
			return false
		}
	}
	return true
}

func (c *claims) ask(o ownClaim, name changetracker.ServicePortName, moved func(changetracker.ServicePortName)) {
	asked := c.byKey[o.key]
	mine := claim{kind: o.kind, name: name}
	i, _ := slices.BinarySearchFunc(asked, mine, claim.compare)
	if i == 0 && len(asked) > 0 {
		moved(asked[0].name)
	}
	c.byKey[o.key] = slices.Insert(asked, i, mine)
}

func (c *claims) withdraw(o ownClaim, name changetracker.ServicePortName, moved func(changetracker.ServicePortName)) {
	asked := c.byKey[o.key]
	i, ok := slices.BinarySearchFunc(asked, claim{kind: o.kind, name: name}, claim.compare)
	if !ok {
		return
	}
	if asked = slices.Delete(asked, i, i+1); len(asked) == 0 {
		delete(c.byKey, o.key)
		return
	}
	c.byKey[o.key] = asked
	if i == 0 {
		moved(asked[0].name)
	}
}

// owner is who gets a key that somebody asked for.
func (c *claims) owner(key desired.Key) changetracker.ServicePortName {
	return c.byKey[key][0].name
}

// granted returns s with the frontends that it gets, and the keys of those that
// others have.
func (c *claims) granted(s *desired.Service) (*desired.Service, []desired.Key) {
	var lost []desired.Key
	for i := range s.Frontends {
		if key := s.Key(&s.Frontends[i]); c.owner(key) != s.Name {
			lost = append(lost, key)
		}
	}
	if len(lost) == 0 {
		return s, nil
	}
	rest := *s
	rest.Frontends = slices.DeleteFunc(slices.Clone(s.Frontends), func(f desired.Frontend) bool {
		return slices.Contains(lost, s.Key(&f))
	})
	return &rest, lost
}
