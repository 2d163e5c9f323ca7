package desired

import (
	"iter"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Update is one step of an engine: what one IP family's data plane must become.
type Update struct {
	Family v1.IPFamily
	// Full says that Changes is everything: whatever else the engine's instance
	// owns in the kernel goes away, and what is there is checked. Otherwise only
	// what Changes names is touched.
	Full bool
	// Changes has each service port once, in the order for engines that need several
	// steps: first what is gone, then what loses frontends to others, then by importance.
	// When Full, none is gone.
	Changes []Change
	// Gone are the Keys of frontends that some service port has had, and none has now,
	// sorted. They depend on service ports alone, not on their endpoints. Also when Full.
	Gone []Key
	// Was is what is acknowledged: each service port as it was programmed last, for the
	// node as it was then. Now is what is wanted. Both are there when Full, too, and hold on
	// to States: keep neither.
	Was, Now *Resolved
	// Globals is always complete. How pods are told apart (SameDetection) changes
	// only with a Full update.
	Globals Globals
}

// Change is what one service port becomes.
type Change struct {
	Name changetracker.ServicePortName
	// After is what to program; nil when the service port is gone.
	After *Service
	// Source is what the trackers say has changed: its Added and Removed are the endpoints
	// that differ from what is acknowledged, with zones, nodes and Ext. Nil when only
	// frontends have moved between service ports, and when Full.
	Source *changetracker.Change
}

// ChangesTo are the Changes that make service ports what these are, in this order.
func ChangesTo(services ...*Service) []Change {
	changes := make([]Change, len(services))
	for i, s := range services {
		changes[i] = Change{Name: s.Name, After: s}
	}
	return changes
}

// Services yields what is to be there after the Update, in order: all of Changes but
// what is gone.
func (u *Update) Services() iter.Seq[*Service] {
	return func(yield func(*Service) bool) {
		for i := range u.Changes {
			if s := u.Changes[i].After; s != nil && !yield(s) {
				return
			}
		}
	}
}

// Removed yields the names of the Changes that are gone.
func (u *Update) Removed() iter.Seq[changetracker.ServicePortName] {
	return func(yield func(changetracker.ServicePortName) bool) {
		for i := range u.Changes {
			if c := &u.Changes[i]; c.After == nil && !yield(c.Name) {
				return
			}
		}
	}
}

// Globals is what all Services of one family share and what may change while the
// proxy runs. Prefixes are masked, sorted, and none contains another.
type Globals struct {
	// ServiceCIDRs are the ranges that ClusterIPs come from. New connections to an
	// address in them that no Service has are dropped. Empty drops nothing.
	ServiceCIDRs []netip.Prefix
	// NodePortAddresses are the node addresses that accept node ports; a /0 stands
	// for every local address but loopback, and empty for none.
	NodePortAddresses []netip.Prefix
	// NodeAddresses are the node's addresses, most important first, as far as the
	// embedding program has told them.
	NodeAddresses []netip.Addr
	// PodCIDRs are the sources that count as pods, when the local detector works
	// by address. Empty when it does not, or when there are none in this family.
	PodCIDRs []netip.Prefix
	// PodInterface is the name of the interface that pod traffic arrives from, with
	// a trailing "*" for a name prefix; empty when the detector works by address.
	PodInterface string
}

// Equal says whether two Globals are the same.
func (g *Globals) Equal(o *Globals) bool {
	return slices.Equal(g.ServiceCIDRs, o.ServiceCIDRs) && slices.Equal(g.NodePortAddresses, o.NodePortAddresses) &&
		slices.Equal(g.NodeAddresses, o.NodeAddresses) && slices.Equal(g.PodCIDRs, o.PodCIDRs) && g.PodInterface == o.PodInterface
}

// DetectsPods says whether there is any way to tell pod traffic. Without it no
// traffic is ever taken for a pod's.
func (g *Globals) DetectsPods() bool { return len(g.PodCIDRs) > 0 || g.PodInterface != "" }

// SameDetection says whether pods are told apart in the same way. The ranges that
// they come from may differ.
func (g *Globals) SameDetection(o *Globals) bool {
	return g.DetectsPods() == o.DetectsPods() && g.PodInterface == o.PodInterface
}
