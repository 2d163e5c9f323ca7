package counting

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

func name(n string) changetracker.ServicePortName {
	return changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "test", Name: n}}
}

func owner(service string, endpoint byte) Owner {
	return Owner{Name: name(service), Endpoint: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, endpoint}), 80)}
}

func service(name string, endpoint byte) *desired.Service {
	of := owner(name, endpoint)
	return &desired.Service{Name: of.Name, Local: desired.EndpointsOf(of.Endpoint)}
}

// text prints the numbers: "a=3(.1=2)" has 3 connections, of which endpoint 10.0.0.1 has 2.
func (l *Ledger[K]) text() string { return textOf(l.Counts()) }

func textOf(counts connection.Counts) string {
	var parts []string
	for _, p := range counts.ServicePorts {
		var endpoints []string
		for _, e := range p.Endpoints {
			endpoints = append(endpoints, fmt.Sprintf(".%d=%d", e.Endpoint.Addr().As4()[3], e.Connections))
		}
		parts = append(parts, fmt.Sprintf("%s=%d(%s)", p.Name.Name, p.Connections, strings.Join(endpoints, " ")))
	}
	return strings.Join(parts, " ")
}

func TestSum(t *testing.T) {
	count := func(n map[string]Owner) connection.Counts {
		l := NewLedger[string]()
		for counter, of := range n {
			l.Add(counter, uint64(len(counter)), of, 0)
		}
		return l.Counts()
	}
	a := count(map[string]Owner{"1": owner("a", 1), "22": owner("a", 2), "4444": owner("c", 1)})
	b := count(map[string]Owner{"333": owner("a", 2), "1": owner("b", 1)})
	b.ServicePorts[0].Connections += 10 // of endpoints that are gone
	early, late := time.Unix(1, 0), time.Unix(2, 0)
	for _, times := range [][3]time.Time{{early, late, early}, {late, early, early}, {late, {}, late}, {{}, late, late}} {
		a.Since, b.Since = times[0], times[1]
		sum := Sum(a, b)
		if text := textOf(sum); text != "a=16(.1=1 .2=5) b=1(.1=1) c=4(.1=4)" || !sum.Since.Equal(times[2]) {
			t.Errorf("sum of %v and %v: %s since %v", a, b, text, sum.Since)
		}
	}
}

func TestLedger(t *testing.T) {
	l := NewLedger[string]()
	add := func(counter string, value uint64, of Owner) { l.Add(counter, value, of, l.Clock()) }
	a1, a2, b1, nobody := owner("a", 1), owner("a", 2), owner("b", 1), Owner{}
	old := l.Clock()
	for _, step := range []struct {
		does string
		do   func()
		want string
	}{
		{"what counted before has no owner", func() { add("w", 50, nobody) }, ""},
		{"then it counts for its owner", func() { add("w", 51, b1) }, "b=1(.1=1)"},
		{"only the difference counts", func() { add("x", 3, a1); add("x", 5, a1) }, "a=5(.1=5) b=1(.1=1)"},
		{"counters of one endpoint add up", func() { add("y", 1, a1) }, "a=6(.1=6) b=1(.1=1)"},
		{"a counter changes its owner", func() { add("x", 9, a2) }, "a=10(.1=6 .2=4) b=1(.1=1)"},
		{"without owner it counts for the last one", func() { add("x", 10, nobody) }, "a=11(.1=6 .2=5) b=1(.1=1)"},
		{"a reading from before is stale", func() { l.Add("x", 4, a1, old) }, "a=11(.1=6 .2=5) b=1(.1=1)"},
		{"a counter that fell began again", func() { add("x", 2, a2) }, "a=13(.1=6 .2=7) b=1(.1=1)"},
		{"a forgotten counter began again", func() { old = l.Clock(); l.Forget("x"); add("x", 2, a2) }, "a=15(.1=6 .2=9) b=1(.1=1)"},
		{"from before it was forgotten", func() { l.Forget("x"); l.Add("x", 7, a2, old) }, "a=15(.1=6 .2=9) b=1(.1=1)"},
		{"all began again", func() { l.ForgetAll(); l.Add("y", 7, a2, old); add("y", 1, a1) }, "a=16(.1=7 .2=9) b=1(.1=1)"},
		{"an endpoint and a service port are gone", func() {
			l.Applied(&desired.Update{Changes: []desired.Change{{Name: name("b")}, {Name: name("a"), After: service("a", 1)}}})
		}, "a=16(.1=7)"},
		{"the endpoint returns", func() { add("z", 1, a2) }, "a=17(.1=7 .2=1)"},
		{"a full update has one less", func() {
			add("v", 1, b1)
			l.Applied(&desired.Update{Full: true, Changes: []desired.Change{{Name: name("a"), After: service("a", 2)}}})
		}, "a=17(.2=1)"},
	} {
		if step.do(); l.text() != step.want {
			t.Errorf("%s: %s, want %s", step.does, l.text(), step.want)
		}
	}
	first := time.Unix(1, 0)
	l.Begin(first)
	l.Begin(first.Add(time.Second))
	if !l.Counts().Since.Equal(first) {
		t.Errorf("since %v, want the first begin %v", l.Counts().Since, first)
	}
}
