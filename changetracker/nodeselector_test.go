package changetracker

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
)

func TestANodeSelector(t *testing.T) {
	edge, other := &Node{Labels: map[string]string{"pool": "edge"}}, &Node{}
	for text, want := range map[string]struct{ canonical, matches string }{
		"":                                 {"", "edge other"},
		"  ":                               {"", "edge other"},
		"pool=edge":                        {"pool=edge", "edge"},
		"pool in (edge,border)":            {"pool in (border,edge)", "edge"},
		"!pool":                            {"!pool", "other"},
		"pool, zone notin (a)":             {"pool,zone notin (a)", "edge"},
		"pool=edge,pool=border":            {"pool=edge,pool=border", ""},
		"pool=":                            {"pool=", ""},
		"pool==(":                          {"error", ""},
		strings.Repeat("a", 1025):          {"error", ""},
		"a=" + strings.Repeat("x", 64):     {"error", ""},
		"kubernetes.io/hostname=n1,!spare": {"kubernetes.io/hostname=n1,!spare", ""},
	} {
		selector, err := ParseNodeSelector(text)
		if err != nil {
			selector = "error"
		}
		var matches []string
		for name, node := range map[string]*Node{"edge": edge, "other": other} {
			if err == nil && selector.Matches(node) {
				matches = append(matches, name)
			}
		}
		if len(matches) == 2 {
			matches = []string{"edge", "other"}
		}
		if got := strings.Join(matches, " "); string(selector) != want.canonical || got != want.matches {
			t.Errorf("%q is %q (%v) and matches %q, want %+v", text, selector, err, got, want)
		}
	}
	if NodeSelector("pool==(").Matches(edge) {
		t.Error("a selector that cannot be parsed matches a node")
	}
}

func TestALongSelectorIsRefused(t *testing.T) {
	for _, text := range []string{
		strings.TrimSuffix(strings.Repeat("a,", 17), ","),
		strings.TrimSuffix(strings.Repeat("a in("+strings.Repeat("b", 57)+"),", 16), ","), // in full it is longer
	} {
		if selector, err := ParseNodeSelector(text); len(text) > longestSelector || err == nil || selector != NoNode {
			t.Errorf("%d bytes are %q (%v), want an error and no node", len(text), selector, err)
		}
	}
	if canonical, err := ParseNodeSelector(string(NoNode)); err != nil || canonical != NoNode {
		t.Errorf("NoNode is %q, %v", canonical, err)
	}
	for _, node := range []Node{{}, {Labels: map[string]string{"serviceplane.io/none": "x"}}} {
		if NoNode.Matches(&node) {
			t.Errorf("NoNode selects %v", node)
		}
	}
}

// exposedOn has all kinds of external frontends on some nodes.
func exposedOn(selector NodeSelector) func(*ServicePort) {
	return func(p *ServicePort) {
		p.ExposeOn, p.NodePort, p.HealthCheckNodePort, p.ExternalPolicyLocal = selector, 30080, 30081, true
		p.ExternalIPs, p.LoadBalancerVIPs = []netip.Addr{netip.MustParseAddr("192.0.2.1")}, []netip.Addr{netip.MustParseAddr("192.0.2.2")}
	}
}

// TestLabelsOfTheNodeChange: a change of labels is a change of the Services that select other nodes then, and of no other.
func TestLabelsOfTheNodeChange(t *testing.T) {
	node := func(pool string) Node { return Node{Name: "n", Labels: map[string]string{"pool": pool}} }
	tracker := mustTracker(t, func(o *Options) { o.Node = node("a") })
	setPort(t, tracker, "ns/always", 1, nodePort(1))
	setPort(t, tracker, "ns/on-b", 2, exposedOn("pool in(b)"))
	setPort(t, tracker, "ns/not-on-c", 3, exposedOn("pool != c"))
	applyPart(t, tracker, Part{})
	want := func(when string, full bool, changed ...string) (delta Delta) {
		t.Helper()
		delta, got := applyPart(t, tracker, Part{})
		if delta.Full != full || !slices.Equal(got, changed) {
			t.Errorf("%s: %v changed, full %v; want %v, %v", when, got, delta.Full, changed, full)
		}
		for _, p := range delta.After.All() {
			n := delta.After.Node()
			exposed, whole := p.NodePort != 0, p.Elsewhere()
			if exposed != p.ExposeOn.Matches(&n) || exposed != (whole == nil) || !exposed && (whole.NodePort == 0 || len(p.ExternalIPs)+len(p.LoadBalancerVIPs)+int(p.HealthCheckNodePort) > 0) {
				t.Errorf("%s: %v with %q is exposed %v, elsewhere %v", when, p, p.ExposeOn, exposed, whole)
			}
		}
		return delta
	}
	if tracker.SetNode(node("d")) {
		t.Error("labels that no Service asks for change something")
	}
	want("d", false)
	if !tracker.SetNode(node("b")) || tracker.SetNode(node("b")) {
		t.Error("a change of labels is not found out, or twice")
	}
	want("b", false, "ns/on-b")
	tracker.SetNode(node("c"))
	want("c", false, "ns/not-on-c", "ns/on-b")
	if ports := want("c again", false).After.HealthCheckNodePorts(); len(ports) > 0 {
		t.Errorf("Services that are not exposed have health check node ports: %v", ports)
	}
	setPort(t, tracker, "ns/on-b", 2, exposedOn("pool=b"), externalIP("192.0.2.3"))
	want("another external IP elsewhere", false, "ns/on-b")
	tracker.SetNode(node("b"))
	if p, _ := want("b again", false, "ns/not-on-c", "ns/on-b").After.Service(ServicePortName{NamespacedName: nameIn("ns/on-b"), Protocol: v1.ProtocolTCP}); len(p.ExternalIPs) != 2 {
		t.Errorf("external IPs %v, want the new one too", p.ExternalIPs)
	}
	moved := node("c")
	moved.Zone = "z"
	tracker.SetNode(moved)
	want("another zone", true, "ns/not-on-c", "ns/on-b")
	hidden, _ := want("the same", false).After.Service(ServicePortName{NamespacedName: nameIn("ns/on-b"), Protocol: v1.ProtocolTCP})
	copied := *hidden
	copied.NodePort, copied.ExposeOn = 30090, ""
	if _, err := tracker.Services.Set(copied.Name.NamespacedName, copied); err != nil {
		t.Fatal(err)
	}
	if p, _ := want("a copy", false, "ns/on-b").After.Service(copied.Name); p.NodePort != 30090 || p.Elsewhere() != nil {
		t.Errorf("a copy is %+v, elsewhere %v", p, p.Elsewhere())
	}
	invalid := ServicePort{Name: ServicePortName{NamespacedName: nameIn("ns/3"), Protocol: v1.ProtocolTCP}, Family: v1.IPv4Protocol, Port: 80, NodePort: 2, ExposeOn: "=("}
	if _, err := tracker.Services.Set(invalid.Name.NamespacedName, invalid); err == nil || !strings.Contains(err.Error(), "ExposeOn") {
		t.Errorf("Set of an invalid selector = %v", err)
	}
}

// TestLabelsAndSources: the ports of a Source that does not count follow the labels, too.
func TestLabelsAndSources(t *testing.T) {
	tracker := mustTracker(t)
	setPort(t, tracker, "ns/1", 1)
	port := ServicePort{Name: ServicePortName{NamespacedName: nameIn("ns/1"), Protocol: v1.ProtocolTCP}, Port: 80, ClusterIP: vipOf(2)}
	exposedOn("pool=a")(&port)
	if _, err := tracker.Source("west").Services.Set(port.Name.NamespacedName, port); err != nil {
		t.Fatal(err)
	}
	for i, pool := range []string{"a", "b", "a"} {
		tracker.SetNode(Node{Labels: map[string]string{"pool": pool}})
		if i == 2 {
			tracker.Services.Delete(port.Name.NamespacedName)
		}
	}
	delta, _ := applyPart(t, tracker, Part{})
	if p, _ := delta.After.Service(port.Name); p.ClusterIP != vipOf(2) || p.NodePort != 30080 {
		t.Errorf("the port of the other Source is %+v, want it exposed", p)
	}
}
