package main

import (
	"cmp"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gw "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// settings are the flags that a plan depends on.
type settings struct {
	// controller is the name by which GatewayClasses choose this program.
	controller gw.GatewayController
	// pool holds the addresses of Gateways.
	pool []netip.Prefix
	// refusing are the endpoints that refuse connections.
	refusing refusing
}

// plan is what follows from the objects. It is made without the clock, the network and the
// API server: the same objects always make the same plan.
type plan struct {
	settings
	objects  *objects
	classes  []*gw.GatewayClass // those of this controller
	gateways []*gateway         // those of accepted classes
	routes   []*route
}

// gateway is a Gateway of this controller.
type gateway struct {
	*gw.Gateway
	addrs []netip.Addr
	// rejected is why the Gateway is not accepted, unaddressed why it lacks an address; nil if
	// it is, and does not.
	rejected, unaddressed *fault
	listeners             []*listener
}

func newPlan(o *objects, s settings) *plan {
	p := &plan{settings: s, objects: o, routes: o.routes()}
	accepted := map[gw.ObjectName]bool{}
	for _, c := range o.classes {
		if c.Spec.ControllerName == s.controller {
			p.classes = append(p.classes, c)
			accepted[gw.ObjectName(c.Name)] = c.Spec.ParametersRef == nil
		}
	}
	for _, g := range o.gateways {
		if accepted[g.Spec.GatewayClassName] {
			p.gateways = append(p.gateways, &gateway{Gateway: g})
		}
	}
	p.address()
	for _, g := range p.gateways {
		g.listen()
	}
	for _, r := range p.routes {
		p.attach(r)
	}
	return p
}

// address gives the Gateways their addresses. Those that have some come first, then the oldest.
func (p *plan) address() {
	slices.SortFunc(p.gateways, func(a, b *gateway) int {
		return cmp.Or(min(1, len(b.Status.Addresses))-min(1, len(a.Status.Addresses)), compareAge(&a.ObjectMeta, &b.ObjectMeta))
	})
	pool := pool{prefixes: p.pool, used: map[netip.Addr]bool{}}
	for _, g := range p.gateways {
		if t := unsupported(g.Gateway); t != "" {
			g.rejected = &fault{gw.GatewayReasonUnsupportedAddress, "addresses of type " + string(t) + " are not supported"}
			continue
		}
		g.addrs, g.unaddressed = pool.assign(g.Gateway)
	}
}

// listen judges the listeners.
func (g *gateway) listen() {
	for i := range g.Spec.Listeners {
		g.listeners = append(g.listeners, newListener(g, &g.Spec.Listeners[i]))
	}
	if !slices.ContainsFunc(g.listeners, (*listener).isAccepted) && g.rejected == nil {
		g.rejected = &fault{gw.GatewayReasonListenersNotValid, "no listener is accepted"}
	}
}

// attach attaches a route to the listeners that it asks for and that allow it. The status says
// to which parents it is attached.
func (p *plan) attach(r *route) {
	parents := slices.DeleteFunc(slices.Clone(r.status.Parents), func(s gw.RouteParentStatus) bool { return s.ControllerName == p.controller })
	backends, resolved := p.objects.resolve(r)
	r.resolved = backends
	for i := range r.refs {
		ref := &r.refs[i]
		g := p.parent(r, ref)
		if g == nil {
			continue // another controller's
		}
		parents = append(parents, gw.RouteParentStatus{
			ParentRef: *ref, ControllerName: p.controller,
			Conditions: merge(r.conditions(p.controller, ref), r.meta.Generation, p.attachTo(g, r, ref), resolved),
		})
	}
	r.parents = parents
}

// parent returns the Gateway that a reference names, if it is one of this controller's.
func (p *plan) parent(r *route, ref *gw.ParentReference) *gateway {
	if deref(ref.Group, gw.GroupName) != gw.GroupName || deref(ref.Kind, "Gateway") != "Gateway" {
		return nil
	}
	want := types.NamespacedName{Namespace: string(deref(ref.Namespace, gw.Namespace(r.meta.Namespace))), Name: string(ref.Name)}
	i := slices.IndexFunc(p.gateways, func(g *gateway) bool { return nameOf(&g.ObjectMeta) == want })
	if i < 0 {
		return nil
	}
	return p.gateways[i]
}

// attachTo attaches a route to a Gateway, and returns the condition Accepted.
func (p *plan) attachTo(g *gateway, r *route, ref *gw.ParentReference) metav1.Condition {
	accepted := condition(gw.RouteConditionAccepted, false, gw.RouteReasonNoMatchingParent, "the Gateway has no such listener")
	for _, l := range g.listeners {
		switch {
		case !l.matches(ref):
			continue
		case l.allows(r, p.objects.namespaces):
			if !slices.Contains(l.routes, r) { // two parentRefs may select one listener
				l.routes = append(l.routes, r)
			}
			accepted = condition(gw.RouteConditionAccepted, true, gw.RouteReasonAccepted, olderRoute(l, r))
		case accepted.Status == metav1.ConditionFalse:
			accepted = condition(gw.RouteConditionAccepted, false, gw.RouteReasonNotAllowedByListeners, "allowedRoutes or the protocol of listener "+string(l.Name)+" excludes the route")
		}
	}
	return accepted
}

// services returns the service ports of each Gateway, and their endpoints.
func (p *plan) services() (ports map[types.NamespacedName][]changetracker.ServicePort, endpoints map[changetracker.ServicePortName][]changetracker.Endpoint) {
	ports, endpoints = map[types.NamespacedName][]changetracker.ServicePort{}, map[changetracker.ServicePortName][]changetracker.Endpoint{}
	for _, g := range p.gateways {
		for _, l := range g.listeners {
			if g.rejected != nil || !l.isAccepted() {
				continue
			}
			name := l.servicePort()
			for _, family := range families() {
				vips := slices.DeleteFunc(slices.Clone(g.addrs), func(a netip.Addr) bool { return familyOf(a) != family })
				if len(vips) == 0 {
					continue
				}
				ports[name.NamespacedName] = append(ports[name.NamespacedName], changetracker.ServicePort{
					Name: name, Family: family, LoadBalancerVIPs: vips, Port: uint16(l.Port), //nolint:gosec // the API validates ports
					CreationTimestamp: g.CreationTimestamp.Time, UID: g.UID,
				})
				endpoints[name] = append(endpoints[name], weigh(l.backends(), family, p.refusing.endpoint(name.Protocol, family))...)
			}
		}
	}
	return ports, endpoints
}

// servicePort returns the name of a listener's service port.
func (l *listener) servicePort() changetracker.ServicePortName {
	return changetracker.ServicePortName{NamespacedName: nameOf(&l.gateway.ObjectMeta), Port: string(l.Name), Protocol: v1.Protocol(l.Protocol)}
}
