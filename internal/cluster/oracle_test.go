package cluster

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
)

// view is a set of API objects as one node sees it, and the oracle: a naive reading of the rules
// that shares no code with the proxy.
type view struct {
	node, zone string
	services   map[types.NamespacedName]*v1.Service
	slices     map[types.NamespacedName]map[string]*discovery.EndpointSlice // by Service, then by key
	claims     map[front]map[types.NamespacedName]bool
}

// front is an address and a port of clients; a node port has no address. All are TCP.
type front struct {
	vip  string
	port int32
}

func newView(node, zone string) view {
	return view{
		node, zone,
		map[types.NamespacedName]*v1.Service{},
		map[types.NamespacedName]map[string]*discovery.EndpointSlice{},
		map[front]map[types.NamespacedName]bool{},
	}
}

// frontsOf lists what a Service claims.
func frontsOf(s *v1.Service) (all []front) {
	if s == nil {
		return nil
	}
	for i := range s.Spec.Ports {
		for _, vip := range s.Spec.ClusterIPs {
			all = append(all, front{vip, s.Spec.Ports[i].Port})
		}
		if n := s.Spec.Ports[i].NodePort; n != 0 {
			all = append(all, front{"", n})
		}
	}
	return all
}

// rivals lists the Services that claim something that a Service claims.
func (v *view) rivals(service types.NamespacedName) (all []types.NamespacedName) {
	for _, f := range frontsOf(v.services[service]) {
		for rival := range v.claims[f] {
			if rival != service {
				all = append(all, rival)
			}
		}
	}
	return all
}

// owns reports whether a Service gets what it claims: the older one does, then that whose UID
// sorts first. Two have the same claim only while a list is taken over.
func (v *view) owns(s *v1.Service, f front) bool {
	for name := range v.claims[f] {
		o := v.services[name]
		if o.CreationTimestamp.Before(&s.CreationTimestamp) || o.CreationTimestamp.Equal(&s.CreationTimestamp) && o.UID < s.UID {
			return false
		}
	}
	return true
}

// serviceOf names the Service that an object is about.
func serviceOf(k kind, o metav1.Object) types.NamespacedName {
	name := o.GetName()
	if k == slicesKind {
		name = o.GetLabels()[discovery.LabelServiceName]
	}
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: name}
}

// set stores an object, or removes it if it is nil.
func (v *view) set(k kind, key string, service types.NamespacedName, o metav1.Object) {
	switch {
	case k == servicesKind:
		for _, f := range frontsOf(v.services[service]) {
			delete(v.claims[f], service)
		}
		v.services[service], _ = o.(*v1.Service)
		for _, f := range frontsOf(v.services[service]) {
			if v.claims[f] == nil {
				v.claims[f] = map[types.NamespacedName]bool{}
			}
			v.claims[f][service] = true
		}
		if o == nil {
			delete(v.services, service)
		}
	case o == nil:
		delete(v.slices[service], key)
	default:
		if v.slices[service] == nil {
			v.slices[service] = map[string]*discovery.EndpointSlice{}
		}
		v.slices[service][key] = o.(*discovery.EndpointSlice)
	}
}

// rules are those of a Service, by family.
type rules [len(families)]map[changetracker.ServicePortName]*rule

func (v *view) rules(service types.NamespacedName, family v1.IPFamily) map[changetracker.ServicePortName]*rule {
	all := map[changetracker.ServicePortName]*rule{}
	for _, name := range v.names(service) {
		all[name] = v.rule(name, family)
	}
	return all
}

// different counts the service ports that differ.
func different(a, b map[changetracker.ServicePortName]*rule) (names []changetracker.ServicePortName) {
	for name, r := range a {
		if !r.equal(b[name]) {
			names = append(names, name)
		}
	}
	for name, r := range b {
		if _, known := a[name]; !known && r != nil {
			names = append(names, name)
		}
	}
	return names
}

// has reports whether an endpoint is in any slice of its Service.
func (v *view) has(t target) bool {
	for _, slice := range v.slices[t.service] {
		for i := range slice.Endpoints {
			if netip.MustParseAddr(slice.Endpoints[i].Addresses[0]) == t.addr {
				return true
			}
		}
	}
	return false
}

func familyOf(slice metav1.Object) v1.IPFamily {
	return v1.IPFamily(slice.(*discovery.EndpointSlice).AddressType)
}

// rule is what a kernel does for one service port. It is immutable.
type rule struct {
	fronts         string // frontends and affinity
	cluster, local []addrPort
}

type addrPort = netip.AddrPort

func (r *rule) equal(o *rule) bool {
	if r == nil || o == nil {
		return r == o
	}
	return r.fronts == o.fronts && slices.Equal(r.cluster, o.cluster) && slices.Equal(r.local, o.local)
}

func (r *rule) String() string {
	if r == nil {
		return "nothing"
	}
	return fmt.Sprintf("%s cluster %v local %v", r.fronts, r.cluster, r.local)
}

// names lists the service ports of a Service.
func (v *view) names(service types.NamespacedName) (names []changetracker.ServicePortName) {
	if s := v.services[service]; s != nil {
		for i := range s.Spec.Ports {
			p := &s.Spec.Ports[i]
			names = append(names, changetracker.ServicePortName{NamespacedName: service, Port: p.Name, Protocol: p.Protocol})
		}
	}
	return names
}

// rule is what a kernel should do for a service port: nil if there is none.
func (v *view) rule(name changetracker.ServicePortName, family v1.IPFamily) *rule {
	s := v.services[name.NamespacedName]
	if s == nil || !slices.Contains(s.Spec.IPFamilies, family) {
		return nil
	}
	i := slices.IndexFunc(s.Spec.Ports, func(p v1.ServicePort) bool { return p.Name == name.Port && p.Protocol == name.Protocol })
	if i < 0 {
		return nil
	}
	port, endpoints := &s.Spec.Ports[i], v.endpoints(name, family)
	cluster, local := v.clusterEndpoints(endpoints), v.localEndpoints(endpoints)
	internal := *s.Spec.InternalTrafficPolicy == v1.ServiceInternalTrafficPolicyLocal
	external := s.Spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal && port.NodePort != 0
	anywhere := len(cluster) > 0 // hints never leave none, so nor does this
	action := func(onlyLocal bool) string {
		switch {
		case !anywhere:
			return "reject"
		case onlyLocal && len(local) == 0:
			return "drop"
		default:
			return "forward"
		}
	}
	r := &rule{}
	if port.NodePort != 0 && v.owns(s, front{"", port.NodePort}) {
		r.fronts = fmt.Sprintf("NodePort %d %s local %v;", port.NodePort, action(external), external)
	}
	if vip := s.Spec.ClusterIPs[slices.Index(s.Spec.IPFamilies, family)]; v.owns(s, front{vip, port.Port}) {
		r.fronts += fmt.Sprintf("ClusterIP %s:%d %s local %v;", vip, port.Port, action(internal), internal)
	}
	r.fronts += fmt.Sprintf("affinity %v", s.Spec.SessionAffinity == v1.ServiceAffinityClientIP)
	if !internal || port.NodePort != 0 {
		r.cluster = addresses(cluster)
	}
	if internal || external {
		r.local = addresses(local)
	}
	return r
}

// endpoint is one address and port of a service port.
type endpoint struct {
	addr                        netip.AddrPort
	ready, serving, terminating bool
	node                        string
	zones                       []string
	slice                       *discovery.EndpointSlice
}

// endpoints lists the endpoints of a service port, each address once.
func (v *view) endpoints(name changetracker.ServicePortName, family v1.IPFamily) (all []endpoint) {
	for _, slice := range v.slices[name.NamespacedName] {
		for _, p := range slice.Ports {
			if string(slice.AddressType) != string(family) || *p.Name != name.Port || *p.Protocol != name.Protocol {
				continue
			}
			for i := range slice.Endpoints {
				all = keepBest(all, newEndpoint(&slice.Endpoints[i], uint16(*p.Port), slice))
			}
		}
	}
	slices.SortFunc(all, func(a, b endpoint) int { return a.addr.Compare(b.addr) })
	return all
}

func newEndpoint(e *discovery.Endpoint, port uint16, slice *discovery.EndpointSlice) endpoint {
	made := endpoint{
		addr:  netip.AddrPortFrom(netip.MustParseAddr(e.Addresses[0]), port),
		ready: *e.Conditions.Ready, serving: *e.Conditions.Serving, terminating: *e.Conditions.Terminating,
		node: *e.NodeName, slice: slice,
	}
	if e.Hints != nil {
		for _, z := range e.Hints.ForZones {
			made.zones = append(made.zones, z.Name)
		}
	}
	return made
}

// keepBest adds an endpoint, unless another slice has a better record of it.
func keepBest(all []endpoint, e endpoint) []endpoint {
	for i := range all {
		if all[i].addr == e.addr {
			if e.better(&all[i]) {
				all[i] = e
			}
			return all
		}
	}
	return append(all, e)
}

func (e *endpoint) better(o *endpoint) bool {
	switch {
	case e.terminating != o.terminating:
		return !e.terminating
	case e.ready != o.ready:
		return e.ready
	case e.serving != o.serving:
		return e.serving
	case !e.slice.CreationTimestamp.Equal(&o.slice.CreationTimestamp):
		return o.slice.CreationTimestamp.Before(&e.slice.CreationTimestamp)
	default:
		return e.slice.Name < o.slice.Name
	}
}

func (v *view) clusterEndpoints(all []endpoint) []endpoint {
	ready := only(all, func(e *endpoint) bool { return e.ready })
	if len(ready) == 0 {
		return only(all, func(e *endpoint) bool { return e.serving && e.terminating })
	}
	here := only(ready, func(e *endpoint) bool { return slices.Contains(e.zones, v.zone) })
	hinted := only(ready, func(e *endpoint) bool { return len(e.zones) > 0 })
	if len(hinted) == len(ready) && len(here) > 0 {
		return here
	}
	return ready
}

func (v *view) localEndpoints(all []endpoint) []endpoint {
	here := only(all, func(e *endpoint) bool { return e.node == v.node })
	if ready := only(here, func(e *endpoint) bool { return e.ready }); len(ready) > 0 {
		return ready
	}
	return only(here, func(e *endpoint) bool { return e.serving && e.terminating })
}

func only(all []endpoint, keep func(*endpoint) bool) (some []endpoint) {
	for i := range all {
		if keep(&all[i]) {
			some = append(some, all[i])
		}
	}
	return some
}

func addresses(endpoints []endpoint) (list []netip.AddrPort) {
	for i := range endpoints {
		list = append(list, endpoints[i].addr)
	}
	return list
}

// describe shortens a difference.
func describe(name changetracker.ServicePortName, have, want *rule) string {
	return strings.Join([]string{name.String(), "has", have.String(), "instead of", want.String()}, " ")
}
