package healthcheck

import (
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/proxier"
)

// book is what has been told about health check node ports. It does no I/O.
type book struct {
	pages map[v1.IPFamily]*page // of the families that have been updated
	told  int                   // counts the ports that were told
}

type page struct {
	services map[types.NamespacedName]claim
	ranges   []netip.Prefix
}

// claim is one Service's port in one family.
type claim struct {
	port  uint16
	local int // endpoints
	told  int // when its port was told; it is the same in all families, but not at once
}

// site is one place to listen at. An empty family is both.
type site struct {
	service          types.NamespacedName
	family           v1.IPFamily
	network, address string
}

// place is a site of any Service.
type place struct {
	family        v1.IPFamily
	network, host string
}

// update takes a HealthUpdate over, and reports whether it may have changed the
// sites.
func (b *book) update(family v1.IPFamily, u proxier.HealthUpdate) bool {
	p, known := b.pages[family]
	if !known {
		p = &page{services: map[types.NamespacedName]claim{}}
		b.pages[family] = p
	}
	moved := !known || !slices.Equal(p.ranges, u.NodePortAddresses)
	p.ranges = slices.Clone(u.NodePortAddresses)
	for name, port := range u.Ports {
		moved = b.claim(p, name, port, u.LocalEndpoints[name]) || moved
	}
	if u.Full {
		before := len(p.services)
		maps.DeleteFunc(p.services, func(name types.NamespacedName, _ claim) bool {
			_, stays := u.Ports[name]
			return !stays
		})
		moved = moved || len(p.services) != before
	}
	return moved
}

// claim reports whether a Service's port is another one than before.
func (b *book) claim(p *page, name types.NamespacedName, port uint16, local int) bool {
	old := p.services[name] // port 0 if there is none
	switch port {
	case 0:
		delete(p.services, name)
	case old.port:
		p.services[name] = claim{port, local, old.told}
	default:
		b.told++
		p.services[name] = claim{port, local, b.told}
	}
	return port != old.port
}

// local is the number of a Service's endpoints on this node in a family, or in the
// other one if it is not of that family.
func (b *book) local(name types.NamespacedName, family v1.IPFamily) int {
	for _, f := range []v1.IPFamily{family, v1.IPv4Protocol, v1.IPv6Protocol} {
		if p := b.pages[f]; p != nil {
			if c, ok := p.services[name]; ok {
				return c.local
			}
		}
	}
	return 0
}

// selective says that local addresses decide where to listen.
func (b *book) selective() bool {
	for _, p := range b.pages {
		if p.selective() {
			return true
		}
	}
	return false
}

func (p *page) selective() bool {
	return len(p.services) > 0 && len(p.ranges) > 0 && !p.wild()
}

// wild says that the ranges are all addresses.
func (p *page) wild() bool {
	return slices.ContainsFunc(p.ranges, func(r netip.Prefix) bool { return r.Bits() == 0 })
}

// sites are where to listen, given the node's addresses.
func (b *book) sites(local []netip.Addr) map[site]struct{} {
	sites := map[site]struct{}{}
	places := b.places(local)
	for name, port := range b.ports() {
		for _, at := range places {
			if at.family != "" && !b.pages[at.family].has(name) {
				continue
			}
			address := net.JoinHostPort(at.host, strconv.Itoa(int(port)))
			sites[site{name, at.family, at.network, address}] = struct{}{}
		}
	}
	return sites
}

func (p *page) has(name types.NamespacedName) bool {
	_, ok := p.services[name]
	return ok
}

// ports has each Service once: if the families disagree, with the port that was
// told last.
func (b *book) ports() map[types.NamespacedName]uint16 {
	latest := map[types.NamespacedName]claim{}
	for _, p := range b.pages {
		for name, c := range p.services {
			if c.told > latest[name].told {
				latest[name] = c
			}
		}
	}
	ports := make(map[types.NamespacedName]uint16, len(latest))
	for name, c := range latest {
		ports[name] = c.port
	}
	return ports
}

func (b *book) places(local []netip.Addr) []place {
	v4, v6 := b.pages[v1.IPv4Protocol], b.pages[v1.IPv6Protocol]
	if v4 != nil && v6 != nil && v4.wild() && v6.wild() {
		return []place{{network: "tcp"}}
	}
	var places []place
	if v4 != nil {
		places = v4.places(place{v1.IPv4Protocol, "tcp4", "0.0.0.0"}, local)
	}
	if v6 != nil {
		places = append(places, v6.places(place{v1.IPv6Protocol, "tcp6", "::"}, local)...)
	}
	return places
}

// places returns all, or the addresses in the ranges.
func (p *page) places(all place, local []netip.Addr) []place {
	if p.wild() {
		return []place{all}
	}
	var places []place
	for _, a := range matching(p.ranges, local) {
		places = append(places, place{all.family, all.network, a.String()})
	}
	return places
}

// matching returns the addresses in the ranges. Link-local ones that come without
// their zone are left out, because nobody can listen on them.
func matching(ranges []netip.Prefix, local []netip.Addr) []netip.Addr {
	var found []netip.Addr
	for _, a := range local {
		a = a.Unmap()
		if a.Is6() && a.IsLinkLocalUnicast() && a.Zone() == "" {
			continue
		}
		if slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return r.Contains(a.WithZone("")) }) {
			found = append(found, a)
		}
	}
	return found
}
