package main

import (
	"cmp"
	"fmt"
	"maps"
	"math/bits"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gw "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// backend is a backendRef with the endpoints of its Service.
type backend struct {
	weight    uint64
	endpoints []netip.AddrPort // none if the reference is invalid
}

// resolve returns the backends of a route with their endpoints, and the condition ResolvedRefs.
func (o *objects) resolve(r *route) ([]backend, metav1.Condition) {
	resolved := condition(gw.RouteConditionResolvedRefs, true, gw.RouteReasonResolvedRefs, "")
	var all []backend
	for _, ref := range r.backends {
		b := backend{weight: uint64(deref(ref.Weight, 1))}
		port, reason, message := o.find(r, ref)
		switch {
		case port != nil:
			b.endpoints = o.endpoints(port)
		case resolved.Status == metav1.ConditionTrue: // the first reason is the one that is shown
			resolved = condition(gw.RouteConditionResolvedRefs, false, reason, message)
		}
		all = append(all, b)
	}
	return all, resolved
}

// servicePort is a port of a Service.
type servicePort struct {
	service *v1.Service
	port    v1.ServicePort
}

// find returns the port of a Service that a backendRef names, or the reason why it may not be
// used.
func (o *objects) find(r *route, ref gw.BackendRef) (port *servicePort, reason gw.RouteConditionReason, message string) {
	if group, kind := deref(ref.Group, ""), deref(ref.Kind, "Service"); group != "" || kind != "Service" {
		return nil, gw.RouteReasonInvalidKind, fmt.Sprintf("%s %s is not a Service", kind, ref.Name)
	}
	name := types.NamespacedName{Namespace: string(deref(ref.Namespace, gw.Namespace(r.meta.Namespace))), Name: string(ref.Name)}
	if name.Namespace != r.meta.Namespace && !o.granted(r, name) {
		return nil, gw.RouteReasonRefNotPermitted, fmt.Sprintf("no ReferenceGrant in namespace %s lets %ss of namespace %s refer to Service %s",
			name.Namespace, r.kind, r.meta.Namespace, name.Name)
	}
	i := slices.IndexFunc(o.services, func(s *v1.Service) bool { return nameOf(&s.ObjectMeta) == name })
	if i < 0 {
		return nil, gw.RouteReasonBackendNotFound, fmt.Sprintf("Service %s does not exist", name)
	}
	for _, p := range o.services[i].Spec.Ports {
		if p.Port == deref(ref.Port, 0) && protocolOf(r.kind) == cmp.Or(p.Protocol, v1.ProtocolTCP) {
			return &servicePort{service: o.services[i], port: p}, "", ""
		}
	}
	return nil, gw.RouteReasonBackendNotFound, fmt.Sprintf("Service %s has no port %d/%s", name, deref(ref.Port, 0), protocolOf(r.kind))
}

// granted reports whether a ReferenceGrant in the Service's namespace permits the reference.
func (o *objects) granted(r *route, service types.NamespacedName) bool {
	from := gw.ReferenceGrantFrom{Group: gw.GroupName, Kind: r.kind, Namespace: gw.Namespace(r.meta.Namespace)}
	return slices.ContainsFunc(o.grants, func(g *gw.ReferenceGrant) bool {
		return g.Namespace == service.Namespace && slices.Contains(g.Spec.From, from) &&
			slices.ContainsFunc(g.Spec.To, func(to gw.ReferenceGrantTo) bool {
				return to.Group == "" && to.Kind == "Service" && deref(to.Name, gw.ObjectName(service.Name)) == gw.ObjectName(service.Name)
			})
	})
}

// endpoints returns the ready endpoints of a service port. If there are none in a family, those
// that serve while they terminate are used, as in a Service (KEP-1669).
func (o *objects) endpoints(p *servicePort) []netip.AddrPort {
	ready, terminating := map[v1.IPFamily][]netip.AddrPort{}, map[v1.IPFamily][]netip.AddrPort{}
	for _, slice := range o.slices {
		port := portOf(slice, p.port)
		if port == 0 || slice.Namespace != p.service.Namespace || slice.Labels[discovery.LabelServiceName] != p.service.Name {
			continue
		}
		for _, e := range slice.Endpoints {
			addr, err := netip.ParseAddr(strings.Join(e.Addresses[:min(1, len(e.Addresses))], "")) // the others have no meaning
			if err != nil {
				continue // the API allows host names
			}
			family, at := familyOf(addr), netip.AddrPortFrom(addr.Unmap(), port)
			switch {
			case deref(e.Conditions.Ready, true):
				ready[family] = append(ready[family], at)
			case deref(e.Conditions.Serving, false) && deref(e.Conditions.Terminating, false):
				terminating[family] = append(terminating[family], at)
			}
		}
	}
	var all []netip.AddrPort
	for _, family := range families() {
		if len(ready[family]) == 0 {
			ready[family] = terminating[family]
		}
		all = append(all, ready[family]...)
	}
	slices.SortFunc(all, netip.AddrPort.Compare)
	return slices.Compact(all)
}

// portOf returns the number of a service port in a slice, or 0.
func portOf(slice *discovery.EndpointSlice, want v1.ServicePort) uint16 {
	for _, p := range slice.Ports {
		if deref(p.Name, "") == want.Name && deref(p.Protocol, v1.ProtocolTCP) == cmp.Or(want.Protocol, v1.ProtocolTCP) {
			return uint16(deref(p.Port, 0)) //nolint:gosec // the API validates ports
		}
	}
	return 0
}

// maxUnit bounds the numbers that weigh multiplies: weights are at most 1,000,000.
const maxUnit = 1 << 32

// weigh gives the endpoints of one family weights, so that each backend gets connections in
// proportion to its weight, whatever the number of its endpoints. The share of a backend
// without endpoints is that of refusing, an endpoint that refuses connections; it is also the
// endpoint if there is no other. The engine would reject these connections too, but with an
// ICMP error, for which a TCP client over IPv6 waits a second.
//
// The weights are exact if they can be numbers up to 65,535, and otherwise the nearest ones.
func weigh(backends []backend, family v1.IPFamily, refusing netip.AddrPort) []changetracker.Endpoint {
	own := make([][]netip.AddrPort, len(backends))
	unit := uint64(1) // a multiple of the number of endpoints of each backend
	for i, b := range backends {
		own[i] = slices.DeleteFunc(slices.Clone(b.endpoints), func(a netip.AddrPort) bool { return familyOf(a.Addr()) != family })
		n := uint64(max(len(own[i]), 1))
		unit = min(unit/gcd(unit, n)*n, maxUnit)
	}
	shares := map[netip.AddrPort]uint64{} // an endpoint may belong to several backends
	for i, b := range backends {
		if len(own[i]) == 0 {
			own[i] = []netip.AddrPort{refusing}
		}
		for _, e := range own[i] {
			shares[e] += b.weight * unit / uint64(len(own[i]))
		}
	}
	maps.DeleteFunc(shares, func(e netip.AddrPort, share uint64) bool { return share == 0 || !e.IsValid() })
	if len(shares) == 0 && refusing.IsValid() {
		shares[refusing] = 1
	}
	return scale(shares)
}

// scale returns endpoints with the shares in lowest terms.
func scale(shares map[netip.AddrPort]uint64) []changetracker.Endpoint {
	var divisor, most uint64
	for _, s := range shares {
		divisor, most = gcd(s, divisor), max(most, s)
	}
	most /= max(divisor, 1)
	endpoints := make([]changetracker.Endpoint, 0, len(shares))
	for addr, s := range shares {
		s /= divisor
		if most > maxWeight {
			high, low := bits.Mul64(s, maxWeight)
			s, _ = bits.Div64(high, low, most)
			s = max(s, 1)
		}
		endpoints = append(endpoints, changetracker.Endpoint{Addr: addr, Weight: uint16(s), Ready: true, Serving: true}) //nolint:gosec // at most maxWeight
	}
	slices.SortFunc(endpoints, func(a, b changetracker.Endpoint) int { return a.Addr.Compare(b.Addr) })
	return endpoints
}

const maxWeight = 1<<16 - 1

func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

func families() []v1.IPFamily { return []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} }

func familyOf(addr netip.Addr) v1.IPFamily {
	if addr.Unmap().Is4() {
		return v1.IPv4Protocol
	}
	return v1.IPv6Protocol
}
