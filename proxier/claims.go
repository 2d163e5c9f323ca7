package proxier

import (
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// claims settles who gets a VIP and port, or a node port, that several service
// ports ask for, as desired.Claim says. The outcome depends on who asks, not on who
// came first here, so that a restart changes nothing. Owned by the family's sync.
type claims struct {
	// nodeAddrs are those of the node's addresses that accept node ports: a VIP there
	// is in the way of another service port's node port.
	nodeAddrs []netip.Addr
	byKey     map[desired.Key][]desired.Claim // sorted, the first one wins
	byName    map[changetracker.ServicePortName][]ownClaim
}

type ownClaim struct {
	key   desired.Key
	claim desired.Claim
}

// onMove is called for other service ports that may have won or lost a key.
type onMove func(changetracker.ServicePortName)

func newClaims(g *desired.Globals) *claims {
	c := &claims{byKey: map[desired.Key][]desired.Claim{}, byName: map[changetracker.ServicePortName][]ownClaim{}}
	for _, a := range g.NodeAddresses {
		if g.AcceptsNodePorts(a) {
			c.nodeAddrs = append(c.nodeAddrs, a)
		}
	}
	return c
}

// update replaces what a service port asks for; s is nil when it is gone.
func (c *claims) update(name changetracker.ServicePortName, s *desired.Service, moved onMove) {
	old := c.byName[name]
	if s != nil && sameClaims(old, s) {
		return
	}
	for _, o := range old {
		c.withdraw(o, moved)
	}
	if s == nil {
		delete(c.byName, name)
		return
	}
	now := make([]ownClaim, len(s.Frontends))
	for i := range s.Frontends {
		now[i] = ownOf(s, i)
		c.ask(now[i], moved)
	}
	c.byName[name] = now
}

func ownOf(s *desired.Service, i int) ownClaim {
	f := &s.Frontends[i]
	return ownClaim{key: s.Key(f), claim: s.Claim(f)}
}

func sameClaims(old []ownClaim, s *desired.Service) bool {
	if len(old) != len(s.Frontends) {
		return false
	}
	for i := range s.Frontends {
		if old[i] != ownOf(s, i) {
			return false
		}
	}
	return true
}

func (c *claims) ask(o ownClaim, moved onMove) {
	asked := c.byKey[o.key]
	i, _ := slices.BinarySearchFunc(asked, o.claim, desired.Claim.Compare)
	if i == 0 {
		c.disturb(o.key, moved)
	}
	c.byKey[o.key] = slices.Insert(asked, i, o.claim)
}

func (c *claims) withdraw(o ownClaim, moved onMove) {
	asked := c.byKey[o.key]
	i, ok := slices.BinarySearchFunc(asked, o.claim, desired.Claim.Compare)
	if !ok {
		return
	}
	if asked = slices.Delete(asked, i, i+1); len(asked) == 0 {
		delete(c.byKey, o.key)
	} else {
		c.byKey[o.key] = asked
	}
	if i == 0 {
		c.disturb(o.key, moved)
	}
}

// disturb names the service ports that come first at a key, and at those that are in
// its way or that it is in the way of.
func (c *claims) disturb(key desired.Key, moved onMove) {
	if first := c.byKey[key]; len(first) > 0 {
		moved(first[0].Name)
	}
	for _, a := range c.nodeAddrs {
		other := key
		switch key.VIP {
		case netip.Addr{}:
			other.VIP = a
		case a:
			other.VIP = netip.Addr{}
		default:
			continue
		}
		if first := c.byKey[other]; len(first) > 0 {
			moved(first[0].Name)
		}
	}
}

// owner is who gets a key that somebody asked for.
func (c *claims) owner(key desired.Key) changetracker.ServicePortName {
	first := c.byKey[key][0]
	if key.VIP.IsValid() && slices.Contains(c.nodeAddrs, key.VIP) {
		key.VIP = netip.Addr{}
		if there := c.byKey[key]; len(there) > 0 && first.YieldsTo(there[0]) {
			return there[0].Name
		}
	}
	return first.Name
}

// granted returns s with the frontends that it gets, and the keys that others have:
// of frontends, or of addresses where its node port does not count.
func (c *claims) granted(s *desired.Service) (*desired.Service, []desired.Key) {
	var lost []desired.Key
	kept := make([]bool, len(s.Frontends))
	all := true
	for i := range s.Frontends {
		key := s.Key(&s.Frontends[i])
		if kept[i] = c.owner(key) == s.Name; !kept[i] {
			lost, all = append(lost, key), false
			continue
		}
		if s.Frontends[i].Kind == desired.NodePort {
			lost = append(lost, c.inTheWay(key, s.Name)...)
		}
	}
	if all {
		return s, lost
	}
	rest := *s
	rest.Frontends = make([]desired.Frontend, 0, len(s.Frontends))
	for i := range s.Frontends {
		if kept[i] {
			rest.Frontends = append(rest.Frontends, s.Frontends[i])
		}
	}
	return &rest, lost
}

// inTheWay are the VIPs of others that take a node port's packets at an address.
func (c *claims) inTheWay(key desired.Key, name changetracker.ServicePortName) (lost []desired.Key) {
	for _, a := range c.nodeAddrs {
		key.VIP = a
		if len(c.byKey[key]) > 0 && c.owner(key) != name {
			lost = append(lost, key)
		}
	}
	return lost
}
