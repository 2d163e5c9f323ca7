package main

import (
	"cmp"
	"slices"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gw "sigs.k8s.io/gateway-api/apis/v1"
)

// objects are all objects that a plan is made of, of all namespaces.
type objects struct {
	classes    []*gw.GatewayClass
	gateways   []*gw.Gateway
	tcpRoutes  []*gw.TCPRoute
	udpRoutes  []*gw.UDPRoute
	grants     []*gw.ReferenceGrant
	namespaces []*v1.Namespace
	services   []*v1.Service
	slices     []*discovery.EndpointSlice
}

// The kinds of routes.
const (
	kindTCPRoute gw.Kind = "TCPRoute"
	kindUDPRoute gw.Kind = "UDPRoute"
)

// route is what TCPRoutes and UDPRoutes have in common.
type route struct {
	object metav1.Object // the route itself
	kind   gw.Kind
	meta   *metav1.ObjectMeta
	refs   []gw.ParentReference
	// backends are those of the first rule. The CRDs allow one rule.
	backends []gw.BackendRef
	status   gw.RouteStatus

	// resolved and parents are what the plan makes of backends and refs.
	resolved []backend
	parents  []gw.RouteParentStatus
}

// routes returns all routes, the oldest first: if several attach to one listener, that one
// gets the connections.
func (o *objects) routes() []*route {
	var all []*route
	for _, r := range o.tcpRoutes {
		all = append(all, &route{object: r, kind: kindTCPRoute, meta: &r.ObjectMeta, refs: r.Spec.ParentRefs, status: r.Status.RouteStatus})
		for _, rule := range r.Spec.Rules[:min(1, len(r.Spec.Rules))] {
			all[len(all)-1].backends = rule.BackendRefs
		}
	}
	for _, r := range o.udpRoutes {
		all = append(all, &route{object: r, kind: kindUDPRoute, meta: &r.ObjectMeta, refs: r.Spec.ParentRefs, status: r.Status.RouteStatus})
		for _, rule := range r.Spec.Rules[:min(1, len(r.Spec.Rules))] {
			all[len(all)-1].backends = rule.BackendRefs
		}
	}
	slices.SortFunc(all, func(a, b *route) int { return compareAge(a.meta, b.meta) })
	return all
}

// compareAge orders objects as the Gateway API resolves conflicts: the oldest first, and
// objects of one age by their names.
func compareAge(a, b *metav1.ObjectMeta) int {
	return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}

func nameOf(meta *metav1.ObjectMeta) types.NamespacedName {
	return types.NamespacedName{Namespace: meta.Namespace, Name: meta.Name}
}

// deref returns what a pointer points to, or the default of the API.
func deref[T any](pointer *T, unset T) T {
	if pointer == nil {
		return unset
	}
	return *pointer
}
