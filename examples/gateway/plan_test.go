package main

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gw "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"

	"github.com/serviceplane/serviceplane/proxiertest"
)

// planned is what a test sees of a plan.
type planned struct {
	conditions map[string]string // by object and type: status and reason
	frontends  map[string]string // by address: endpoints
}

// planOf makes a plan of a GatewayClass "test", of Services a, b (apps) and far (shop) with two
// endpoints, one, and one, and of other objects.
func planOf(t *testing.T, text string) planned {
	t.Helper()
	o := &objects{
		classes:    []*gw.GatewayClass{{ObjectMeta: metav1.ObjectMeta{Name: "test"}, Spec: gw.GatewayClassSpec{ControllerName: testController}}},
		namespaces: []*v1.Namespace{{ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{"edge": "yes"}}}},
	}
	for name, ips := range map[string]string{"apps/a": "10.0.0.1 10.0.0.2 fd00::1", "apps/b": "10.0.0.3", "shop/far": "10.0.0.4"} {
		namespace, name, _ := strings.Cut(name, "/")
		o.services = append(o.services, proxiertest.Service(namespace, name, proxiertest.Port("web", v1.ProtocolTCP, 80)))
		for i, ip := range strings.Fields(ips) {
			o.slices = append(o.slices, proxiertest.Slice(namespace, name, discovery.AddressTypeIPv4,
				proxiertest.SliceName(fmt.Sprint(name, i)), proxiertest.SlicePort("web", v1.ProtocolTCP, 8080), proxiertest.Endpoint(ip)))
		}
	}
	for i, document := range strings.Split(text, "---\n") {
		o.add(t, document, metav1.NewTime(time.Unix(int64(i), 0)))
	}
	pool := []netip.Prefix{netip.MustParsePrefix("198.19.0.0/30"), netip.MustParsePrefix("2001:db8::/126")}
	p := newPlan(o, settings{controller: testController, pool: pool, refusing: refusing{
		{v1.ProtocolTCP, v1.IPv4Protocol}: netip.MustParseAddrPort("192.0.2.1:1"),
	}})
	return p.seen()
}

// add decodes an object. Those of a test are of different ages.
func (o *objects) add(t *testing.T, document string, created metav1.Time) {
	t.Helper()
	var kind metav1.TypeMeta
	decode := func(into any) {
		t.Helper()
		if err := yaml.UnmarshalStrict([]byte(document), into); err != nil {
			t.Fatalf("%s: %v", document, err)
		}
	}
	if err := yaml.Unmarshal([]byte(document), &kind); err != nil {
		t.Fatal(err)
	}
	switch kind.Kind {
	case "Gateway":
		g := &gw.Gateway{}
		decode(g)
		g.CreationTimestamp, g.Generation = created, 7
		o.gateways = append(o.gateways, g)
	case "TCPRoute":
		r := &gw.TCPRoute{}
		decode(r)
		r.CreationTimestamp, r.Generation = created, 7
		o.tcpRoutes = append(o.tcpRoutes, r)
	case "ReferenceGrant":
		g := &gw.ReferenceGrant{}
		decode(g)
		o.grants = append(o.grants, g)
	default:
		t.Fatalf("%q: unknown kind", document)
	}
}

func (p *plan) seen() planned {
	got := planned{conditions: map[string]string{}, frontends: map[string]string{}}
	note := func(object string, conditions []metav1.Condition) {
		for _, c := range conditions {
			got.conditions[object+" "+c.Type] = fmt.Sprintf("%s %s %d", c.Status, c.Reason, c.ObservedGeneration)
		}
	}
	for _, g := range p.gateways {
		status := p.gatewayStatus(g, nil)
		note(g.Name, status.Conditions)
		for _, l := range status.Listeners {
			name := g.Name + "/" + string(l.Name)
			note(name, l.Conditions)
			got.conditions[name] = fmt.Sprintf("%d routes of %d kinds", l.AttachedRoutes, len(l.SupportedKinds))
		}
	}
	for _, r := range p.routes {
		for _, s := range r.parents {
			note(r.meta.Name, s.Conditions)
		}
	}
	ports, endpoints := p.services()
	for _, list := range ports {
		for _, port := range list {
			var to []string
			for _, e := range endpoints[port.Name] {
				if familyOf(e.Addr.Addr()) == port.Family {
					to = append(to, fmt.Sprintf("%s*%d", e.Addr, e.Weight))
				}
			}
			got.frontends[fmt.Sprintf("%v:%d", port.LoadBalancerVIPs[0], port.Port)] = strings.Join(to, " ")
		}
	}
	return got
}

const (
	testController gw.GatewayController = "example.org/gateway"

	gatewayGroup = "apiVersion: gateway.networking.k8s.io/v1\n"
	listenTCP    = "{name: tcp, port: 80, protocol: TCP}"
	accepted     = "True Accepted 7"
	resolved     = "True ResolvedRefs 7"
)

func gatewayOf(name string, spec string) string {
	return gatewayGroup + "kind: Gateway\nmetadata: {namespace: apps, name: " + name + "}\nspec: {gatewayClassName: test, " + spec + "}\n---\n"
}

func routeOf(name, parent, backends string) string {
	namespace, name, _ := strings.Cut(name, "/")
	return gatewayGroup + "kind: TCPRoute\nmetadata: {namespace: " + namespace + ", name: " + name + "}\n" +
		"spec: {parentRefs: [{namespace: apps, " + parent + "}], rules: [{backendRefs: [" + backends + "]}]}\n---\n"
}

func grantOf(to string) string {
	return gatewayGroup + "kind: ReferenceGrant\nmetadata: {namespace: shop, name: grant}\nspec: {from: [{group: gateway.networking.k8s.io, kind: TCPRoute, namespace: apps}], to: [" + to + "]}\n---\n"
}

// TestPlans compares what objects become. A condition that is not listed is not compared.
func TestPlans(t *testing.T) {
	edge := gatewayOf("edge", "listeners: ["+listenTCP+"]")
	far := routeOf("apps/r", "name: edge", "{namespace: shop, name: far, port: 80}")
	const vip4, vip6, refused = "198.19.0.1:80", "2001:db8::1:80", "192.0.2.1:1*1"
	for name, c := range map[string]struct {
		objects    string
		conditions map[string]string
		frontends  map[string]string
	}{
		"weights are of Services": {
			edge + routeOf("apps/r", "name: edge", "{name: a, port: 80, weight: 9}, {name: b, port: 80, weight: 1}"),
			map[string]string{"edge Accepted": accepted, "edge Programmed": "True Programmed 7", "edge/tcp": "1 routes of 1 kinds", "r Accepted": accepted, "r ResolvedRefs": resolved},
			map[string]string{vip4: "10.0.0.1:8080*9 10.0.0.2:8080*9 10.0.0.3:8080*2", vip6: "[fd00::1]:8080*1"},
		},
		"a Service twice": {
			edge + routeOf("apps/r", "name: edge", "{name: a, port: 80, weight: 1}, {name: a, port: 80, weight: 2}, {name: b, port: 80, weight: 3}"),
			nil,
			map[string]string{vip4: "10.0.0.1:8080*1 10.0.0.2:8080*1 10.0.0.3:8080*2", vip6: "[fd00::1]:8080*1"},
		},
		"a missing Service refuses its share": {
			edge + routeOf("apps/r", "name: edge", "{name: b, port: 80, weight: 7}, {name: c, port: 80, weight: 3}"),
			map[string]string{"r Accepted": accepted, "r ResolvedRefs": "False BackendNotFound 7"},
			map[string]string{vip4: "10.0.0.3:8080*7 192.0.2.1:1*3", vip6: ""},
		},
		"a missing port, another kind": {
			edge + routeOf("apps/r", "name: edge", "{name: b, port: 81}") + routeOf("apps/s", "name: edge", "{group: example.org, kind: Bucket, name: b}"),
			map[string]string{"r ResolvedRefs": "False BackendNotFound 7", "s ResolvedRefs": "False InvalidKind 7", "edge/tcp": "2 routes of 1 kinds"},
			map[string]string{vip4: refused, vip6: ""},
		},
		"no weight, no route": {
			edge + routeOf("apps/r", "name: edge", "{name: b, port: 80, weight: 0}") + gatewayOf("idle", "listeners: ["+listenTCP+"]"),
			nil,
			map[string]string{vip4: refused, vip6: "", "198.19.0.2:80": refused, "2001:db8::2:80": ""},
		},
		"weights that do not fit": {
			edge + routeOf("apps/r", "name: edge", "{name: a, port: 80, weight: 1000000}, {name: b, port: 80, weight: 1}"),
			nil,
			map[string]string{vip4: "10.0.0.1:8080*65535 10.0.0.2:8080*65535 10.0.0.3:8080*1", vip6: "[fd00::1]:8080*1"},
		},
		"the oldest route wins": {
			edge + routeOf("apps/z", "name: edge", "{name: b, port: 80}") + routeOf("apps/a", "name: edge", "{name: a, port: 80}"),
			map[string]string{"z Accepted": accepted, "a Accepted": accepted, "edge/tcp": "2 routes of 1 kinds"},
			map[string]string{vip4: "10.0.0.3:8080*1", vip6: ""},
		},
		"without a grant": {
			edge + far, map[string]string{"r Accepted": accepted, "r ResolvedRefs": "False RefNotPermitted 7"}, map[string]string{vip4: refused, vip6: ""},
		},
		"a grant of a Service": {
			edge + far + grantOf("{group: '', kind: Service, name: far}"), map[string]string{"r ResolvedRefs": resolved}, map[string]string{vip4: "10.0.0.4:8080*1", vip6: ""},
		},
		"a grant of all Services": {
			edge + far + grantOf("{group: '', kind: Service}"), map[string]string{"r ResolvedRefs": resolved}, nil,
		},
		"a grant of others": {
			edge + far + grantOf("{group: '', kind: Service, name: near}, {group: '', kind: Secret}"), map[string]string{"r ResolvedRefs": "False RefNotPermitted 7"}, nil,
		},
		"sectionName and port": {
			gatewayOf("edge", "listeners: ["+listenTCP+", {name: alt, port: 81, protocol: TCP}]") +
				routeOf("apps/by-name", "name: edge, sectionName: alt", "{name: a, port: 80}") + routeOf("apps/by-port", "name: edge, port: 80", "{name: b, port: 80}") +
				routeOf("apps/neither", "name: edge, sectionName: alt, port: 80", "{name: b, port: 80}"),
			map[string]string{"by-name Accepted": accepted, "by-port Accepted": accepted, "neither Accepted": "False NoMatchingParent 7", "edge/alt": "1 routes of 1 kinds"},
			map[string]string{vip4: "10.0.0.3:8080*1", vip6: "", "198.19.0.1:81": "10.0.0.1:8080*1 10.0.0.2:8080*1", "2001:db8::1:81": "[fd00::1]:8080*1"},
		},
		"other namespaces": {
			edge + routeOf("shop/r", "name: edge", "{name: far, port: 80}"), map[string]string{"r Accepted": "False NotAllowedByListeners 7", "edge/tcp": "0 routes of 1 kinds"}, nil,
		},
		"all namespaces": {
			gatewayOf("edge", "listeners: [{name: tcp, port: 80, protocol: TCP, allowedRoutes: {namespaces: {from: All}}}]") + routeOf("shop/r", "name: edge", "{name: far, port: 80}"),
			map[string]string{"r Accepted": accepted},
			map[string]string{vip4: "10.0.0.4:8080*1", vip6: ""},
		},
		"selected namespaces": {
			gatewayOf("edge", "listeners: [{name: tcp, port: 80, protocol: TCP, allowedRoutes: {namespaces: {from: Selector, selector: {matchLabels: {edge: 'yes'}}}}}]") +
				routeOf("shop/r", "name: edge", "{name: far, port: 80}") + routeOf("apps/q", "name: edge", "{name: a, port: 80}"),
			map[string]string{"r Accepted": accepted, "q Accepted": "False NotAllowedByListeners 7"},
			nil,
		},
		"protocols": {
			gatewayOf("edge", "listeners: ["+listenTCP+", {name: udp, port: 80, protocol: UDP}, {name: http, port: 8080, protocol: HTTP}]") +
				routeOf("apps/r", "name: edge, sectionName: udp", "{name: a, port: 80}") + routeOf("apps/s", "name: edge, sectionName: http", "{name: a, port: 80}"),
			map[string]string{
				"edge Accepted": "True ListenersNotValid 7", "edge/tcp Accepted": accepted, "edge/udp Conflicted": "False NoConflicts 7", "edge/http Accepted": "False UnsupportedProtocol 7",
				"edge/http": "0 routes of 0 kinds", "r Accepted": "False NotAllowedByListeners 7", "s Accepted": "False NotAllowedByListeners 7",
			},
			nil,
		},
		"kinds": {
			gatewayOf("edge", "listeners: [{name: tcp, port: 80, protocol: TCP, allowedRoutes: {kinds: [{kind: TCPRoute}, {kind: HTTPRoute}]}}]"),
			map[string]string{"edge/tcp ResolvedRefs": "False InvalidRouteKinds 7", "edge/tcp Accepted": accepted, "edge/tcp": "0 routes of 1 kinds"},
			nil,
		},
		"conflicts": {
			gatewayOf("edge", "listeners: ["+listenTCP+", {name: https, port: 80, protocol: HTTPS}, {name: udp, port: 80, protocol: UDP}]"),
			map[string]string{
				"edge/tcp Conflicted": "True ProtocolConflict 7", "edge/https Conflicted": "True ProtocolConflict 7", "edge/tcp Accepted": "False ProtocolConflict 7",
				"edge/udp Accepted": accepted, "edge Accepted": "True ListenersNotValid 7",
			},
			map[string]string{vip4: "", vip6: ""}, // those of UDP
		},
		"no listener": {
			gatewayOf("edge", "listeners: [{name: http, port: 80, protocol: HTTP}]"),
			map[string]string{"edge Accepted": "False ListenersNotValid 7", "edge Programmed": "False Invalid 7", "edge/http Programmed": "False Invalid 7"},
			map[string]string{},
		},
		"requested addresses": {
			gatewayOf("edge", "addresses: [{value: 198.19.0.2}], listeners: ["+listenTCP+"]") + gatewayOf("thief", "addresses: [{value: 198.19.0.2}], listeners: ["+listenTCP+"]") +
				gatewayOf("other", "addresses: [{value: 192.0.2.9}], listeners: ["+listenTCP+"]") + gatewayOf("named", "addresses: [{type: Hostname, value: example.org}], listeners: ["+listenTCP+"]") +
				gatewayOf("any", "addresses: [{type: IPAddress}], listeners: ["+listenTCP+"]"),
			map[string]string{
				"edge Programmed": "True Programmed 7", "thief Programmed": "False AddressNotUsable 7", "thief Accepted": accepted, "other Programmed": "False AddressNotUsable 7",
				"named Accepted": "False UnsupportedAddress 7", "any Programmed": "True Programmed 7",
			},
			map[string]string{"198.19.0.2:80": refused, vip4: refused, vip6: ""},
		},
		"addresses stay": {
			gatewayOf("new", "listeners: ["+listenTCP+"]") + strings.Replace(edge, "\n---", "\nstatus: {addresses: [{value: 198.19.0.2}, {value: '2001:db8::2'}]}\n---", 1),
			nil,
			map[string]string{vip4: refused, vip6: "", "198.19.0.2:80": refused, "2001:db8::2:80": ""},
		},
		"no address is left": {
			edge + gatewayOf("b", "listeners: ["+listenTCP+"]") + gatewayOf("c", "listeners: ["+listenTCP+"]") + gatewayOf("d", "listeners: ["+listenTCP+"]"),
			map[string]string{"c Programmed": "True Programmed 7", "d Programmed": "False AddressNotAssigned 7", "d/tcp Programmed": "False Invalid 7"},
			nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := planOf(t, strings.TrimSuffix(c.objects, "---\n"))
			for condition, want := range c.conditions {
				if got.conditions[condition] != want {
					t.Errorf("%s: %q, want %q", condition, got.conditions[condition], want)
				}
			}
			if c.frontends == nil {
				return
			}
			if !maps.Equal(got.frontends, c.frontends) {
				t.Errorf("frontends %q, want %q", got.frontends, c.frontends)
			}
		})
	}
}

// Terminating endpoints serve if a Service has no others, as in kube-proxy.
func TestTerminatingEndpointsServe(t *testing.T) {
	service := proxiertest.Service("apps", "a", proxiertest.Port("web", v1.ProtocolTCP, 80))
	slice := func(options ...proxiertest.SliceOption) *discovery.EndpointSlice {
		return proxiertest.Slice("apps", "a", discovery.AddressTypeIPv4, append(options, proxiertest.SlicePort("web", v1.ProtocolTCP, 8080))...)
	}
	terminating := slice(proxiertest.Endpoint("10.0.0.1", proxiertest.Terminating()), proxiertest.Endpoint("10.0.0.2", proxiertest.NotServing()))
	for want, extra := range map[string]*discovery.EndpointSlice{
		"[10.0.0.1:8080]": slice(),
		"[10.0.0.3:8080]": slice(proxiertest.Endpoint("10.0.0.3")),
	} {
		o := &objects{services: []*v1.Service{service}, slices: []*discovery.EndpointSlice{terminating, extra}}
		got := o.endpoints(&servicePort{service: service, port: service.Spec.Ports[0]})
		if fmt.Sprint(got) != want {
			t.Errorf("endpoints %v, want %v", got, want)
		}
	}
}

// The status of other controllers stays, and a parent that is no longer named goes.
func TestOtherControllersStatusStays(t *testing.T) {
	parent := func(name gw.ObjectName, controller gw.GatewayController) gw.RouteParentStatus {
		return gw.RouteParentStatus{ParentRef: gw.ParentReference{Name: name}, ControllerName: controller}
	}
	r := &gw.TCPRoute{ObjectMeta: metav1.ObjectMeta{Namespace: "apps", Name: "r"}}
	r.Status.Parents = []gw.RouteParentStatus{parent("theirs", "example.org/other"), parent("ours", testController)}
	p := newPlan(&objects{tcpRoutes: []*gw.TCPRoute{r}}, settings{controller: testController})
	if got := p.routes[0].parents; len(got) != 1 || got[0].ParentRef.Name != "theirs" {
		t.Errorf("parents %v, want the one of the other controller", got)
	}
}

// A failure is in the status of the listener and of the Gateway.
func TestFailuresAreInTheStatus(t *testing.T) {
	g := &gw.Gateway{ObjectMeta: metav1.ObjectMeta{Namespace: "apps", Name: "edge"}, Spec: gw.GatewaySpec{GatewayClassName: "test", Listeners: []gw.Listener{
		{Name: "tcp", Port: 80, Protocol: gw.TCPProtocolType}, {Name: "udp", Port: 80, Protocol: gw.UDPProtocolType},
	}}}
	class := &gw.GatewayClass{ObjectMeta: metav1.ObjectMeta{Name: "test"}, Spec: gw.GatewayClassSpec{ControllerName: testController}}
	p := newPlan(&objects{gateways: []*gw.Gateway{g}, classes: []*gw.GatewayClass{class}},
		settings{controller: testController, pool: []netip.Prefix{netip.MustParsePrefix("198.19.0.0/30")}})
	status := p.gatewayStatus(p.gateways[0], failures{p.gateways[0].listeners[0].servicePort(): fmt.Errorf("no space")})
	find := func(conditions []metav1.Condition, name string) string {
		i := slices.IndexFunc(conditions, func(c metav1.Condition) bool { return c.Type == name })
		return fmt.Sprint(conditions[i].Status, " ", conditions[i].Reason, " ", conditions[i].Message)
	}
	for where, got := range map[string]string{
		"False Pending no space": find(status.Conditions, "Programmed"),
		"True Programmed ":       find(status.Listeners[1].Conditions, "Programmed"),
		"True Accepted ":         find(status.Conditions, "Accepted"),
	} {
		if got != where {
			t.Errorf("condition %q, want %q", got, where)
		}
	}
	if got := find(status.Listeners[0].Conditions, "Programmed"); got != "False Pending no space" {
		t.Errorf("condition of the listener %q", got)
	}
}
