package changetracker

import (
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

// TestLabelsOfTheNodeChange: they matter, and cost a full sync, only if a Service asks for nodes.
func TestLabelsOfTheNodeChange(t *testing.T) {
	tracker := mustTracker(t)
	node := func(pool string) Node { return Node{Name: "n", Labels: map[string]string{"pool": pool}} }
	tracker.SetNode(node("a"))
	setPort(t, tracker, "ns/1", 1, nodePort(1))
	applyPart(t, tracker, Part{})
	if tracker.SetNode(node("b")) {
		t.Error("labels change something, and no Service asks for nodes")
	}
	setPort(t, tracker, "ns/2", 2, func(p *ServicePort) { p.ExposeOn = "pool = c" })
	delta, _ := applyPart(t, tracker, Part{})
	port, _ := delta.After.Service(delta.Changes[0].Name)
	if delta.Full || port.ExposeOn != "pool=c" || delta.After.Node().Labels["pool"] != "b" {
		t.Errorf("full %v, selector %q, node %+v", delta.Full, port.ExposeOn, delta.After.Node())
	}
	if tracker.SetNode(node("b")) || !tracker.SetNode(node("c")) {
		t.Error("a change of labels is not found out")
	}
	if delta, _ := applyPart(t, tracker, Part{}); !delta.Full {
		t.Error("the sync after a change of labels is not full")
	}
	invalid := ServicePort{Name: ServicePortName{NamespacedName: nameIn("ns/3"), Protocol: v1.ProtocolTCP}, Family: v1.IPv4Protocol, Port: 80, NodePort: 2, ExposeOn: "=("}
	if _, err := tracker.Services.Set(invalid.Name.NamespacedName, invalid); err == nil || !strings.Contains(err.Error(), "ExposeOn") {
		t.Errorf("Set of an invalid selector = %v", err)
	}
}
