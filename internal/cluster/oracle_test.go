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
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/oracle"
)

// view is a set of API objects as one node sees it.
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
		all[name] = nil // without a rule in this family
	}
	for name, decision := range v.decide(service, family) {
		if name.NamespacedName == service {
			all[name] = decidedRule(&decision)
		}
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
	if decision, ok := v.decide(name.NamespacedName, family)[name]; ok {
		return decidedRule(&decision)
	}
	return nil
}

// decide is for a Service and those that claim the same.
func (v *view) decide(service types.NamespacedName, family v1.IPFamily) map[changetracker.ServicePortName]oracle.Decision {
	c := &oracle.Cluster{
		Services: map[string]*v1.Service{}, Slices: v.slices[service],
		Node: changetracker.Node{Name: v.node, Zone: v.zone}, Kinds: []string{"ClusterIP", "NodePort"},
	}
	for _, name := range append(v.rivals(service), service) {
		if s := v.services[name]; s != nil {
			c.Services[name.String()] = s
		}
	}
	return oracle.Decide(c, family)
}

func decidedRule(decision *oracle.Decision) *rule {
	r := &rule{cluster: decision.Cluster, local: decision.Local}
	for _, f := range decision.Frontends {
		r.front(f.Key, f.Kind, f.Action, f.Scope)
	}
	r.fronts += fmt.Sprintf("affinity %v", decision.Affinity != 0)
	return r
}

// front adds a frontend.
func (r *rule) front(key desired.Key, kind, action, scope string) {
	where := fmt.Sprint(key.Port)
	if key.VIP.IsValid() {
		where = netip.AddrPortFrom(key.VIP, key.Port).String()
	}
	r.fronts += fmt.Sprintf("%s %s %s %s;", kind, where, action, scope)
}

// describe shortens a difference.
func describe(name changetracker.ServicePortName, have, want *rule) string {
	return strings.Join([]string{name.String(), "has", have.String(), "instead of", want.String()}, " ")
}
