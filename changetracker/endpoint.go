package changetracker

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// Endpoint is an address and port that serves a service port. An Endpoint in a State is
// immutable.
type Endpoint struct {
	Addr netip.AddrPort
	// Ready, Serving and Terminating are the EndpointSlice conditions. An absent condition has
	// the default of the API: ready, serving, not terminating.
	Ready, Serving, Terminating bool
	// Ejected means that the endpoint would be usable, and that an Override ejects it: it is
	// neither Ready nor Serving therefore.
	Ejected bool
	// Maintenance stops new connections, for as long as somebody works on the endpoint; those that
	// are open stay. The trackers clear Ready, and set Serving of an endpoint that was ready.
	Maintenance bool
	// Priority is the endpoint's group. Of a service port's groups one serves, the one with the lowest
	// number that can: see ServicePort.Failover.
	Priority uint8
	// Weight is the endpoint's share of new connections, relative to the other endpoints. 0 is
	// the default and means 1; the trackers store 0 for 1. It never means no traffic; for that
	// see Maintenance.
	Weight uint16
	// Zone and Node are where the endpoint runs; empty if unknown. View.Local reports whether it
	// is local.
	Zone, Node string
	// ZoneHints and NodeHints name the zones and nodes that should use this endpoint according
	// to the control plane, sorted; nil means no hint.
	ZoneHints, NodeHints []string
	// Ext is a payload of the embedding program, which Options.DecorateEndpoint sets.
	Ext any
}

// Usable reports whether the endpoint may receive traffic in some situation: it is ready, or it
// serves while it terminates (KEP-1669).
func (e *Endpoint) Usable() bool { return e.Ready || e.draining() }

// Equal compares everything but Ext.
func (e *Endpoint) Equal(o *Endpoint) bool { return e.Addr == o.Addr && e.alike(o) }

// alike compares everything but Addr and Ext.
func (e *Endpoint) alike(o *Endpoint) bool {
	return e.Ready == o.Ready && e.Serving == o.Serving && e.Terminating == o.Terminating && e.Ejected == o.Ejected &&
		e.Maintenance == o.Maintenance && e.Priority == o.Priority && e.share() == o.share() && e.Zone == o.Zone && e.Node == o.Node &&
		slices.Equal(e.ZoneHints, o.ZoneHints) && slices.Equal(e.NodeHints, o.NodeHints)
}

// share is the effective weight.
func (e *Endpoint) share() uint16 { return max(e.Weight, 1) }

// tidy brings an endpoint that did not come from the parser, but for its address, into canonical form.
func (e *Endpoint) tidy() {
	e.ZoneHints, e.NodeHints = canonicalNames(e.ZoneHints), canonicalNames(e.NodeHints)
	if e.Weight == 1 {
		e.Weight = 0
	}
	if e.Maintenance {
		e.Ready, e.Serving = false, e.Ready || e.Serving
	}
}

// String is the address, with the conditions, the group and the weight if they are not the default.
func (e *Endpoint) String() string {
	s := e.Addr.String()
	switch {
	case e.Ejected:
		s += " ejected"
	case e.Maintenance:
		s += " maintenance"
	case !e.Ready:
		s += " notready"
	}
	if e.Terminating {
		s += " terminating serving=" + strconv.FormatBool(e.Serving)
	}
	if e.Priority > 0 {
		s += " priority=" + strconv.Itoa(int(e.Priority))
	}
	if e.share() > 1 {
		s += " weight=" + strconv.Itoa(int(e.Weight))
	}
	return s
}

// draining reports whether the endpoint serves while it terminates, and may get new connections then.
func (e *Endpoint) draining() bool { return e.Serving && e.Terminating && !e.Maintenance }

// rank orders the records of one address by their conditions, the highest first (W-04): not
// terminating, since a new pod may have the address of one that terminates (EPS-19), then
// ready, then serving.
func (e *Endpoint) rank() int { return 4*count(!e.Terminating) + 2*count(e.Ready) + count(e.Serving) }

// preference is positive if e is the better record of its address. It is 0 only for records
// that differ in nothing but Ext.
func (e *Endpoint) preference(o *Endpoint) int {
	return cmp.Or(
		cmp.Compare(e.rank(), o.rank()),
		cmp.Compare(o.Priority, e.Priority),
		cmp.Compare(e.Weight, o.Weight),
		cmp.Compare(count(o.Maintenance), count(e.Maintenance)),
		strings.Compare(o.Node, e.Node), // from here on, any stable order
		strings.Compare(o.Zone, e.Zone),
		slices.Compare(o.ZoneHints, e.ZoneHints),
		slices.Compare(o.NodeHints, e.NodeHints),
	)
}

func count(is bool) int {
	if is {
		return 1
	}
	return 0
}

func compareByAddr(a, b Endpoint) int { return a.Addr.Compare(b.Addr) }

func byAddr(a, b *Endpoint) int { return a.Addr.Compare(b.Addr) }

// dropDuplicates keeps the preferred record of each address of a sorted list (EPS-19, W-04).
func dropDuplicates(list []Endpoint) []Endpoint {
	kept := list[:0]
	for i := range list {
		last := len(kept) - 1
		switch {
		case last < 0 || kept[last].Addr != list[i].Addr:
			kept = append(kept, list[i])
		case list[i].preference(&kept[last]) > 0:
			kept[last] = list[i]
		}
	}
	return kept
}

// findEndpoint returns the endpoint of a sorted list that has the address, or nil.
func findEndpoint(list []Endpoint, addr netip.AddrPort) *Endpoint {
	i, found := searchEndpoint(list, addr)
	if !found {
		return nil
	}
	return &list[i]
}

func searchEndpoint(list []Endpoint, addr netip.AddrPort) (index int, found bool) {
	low, high := 0, len(list)
	for low < high { // not slices.BinarySearchFunc, which copies the large Endpoint
		middle := int(uint(low+high) >> 1)
		if list[middle].Addr.Compare(addr) < 0 {
			low = middle + 1
		} else {
			high = middle
		}
	}
	return low, low < len(list) && list[low].Addr == addr
}

// endpointAt returns the endpoint that has the address, or nil.
func endpointAt(list *endpointList, addr netip.AddrPort) *Endpoint {
	if e := list.Find(func(e *Endpoint) bool { return e.Addr.Compare(addr) < 0 }); e != nil && e.Addr == addr {
		return e
	}
	return nil
}

// hasAddr reports whether a list has an endpoint with that address, at any port.
func hasAddr(list *endpointList, addr netip.Addr) bool {
	e := list.Find(func(e *Endpoint) bool { return e.Addr.Addr().Less(addr) })
	return e != nil && e.Addr.Addr() == addr
}
