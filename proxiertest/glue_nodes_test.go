package proxiertest_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// switches is one process that programs the switch of every node, like OVN's northbound
// database: one tracker without a node, and a resolver for each node. It writes only the
// rows of nodes whose view changed.
type switches struct {
	tracker *changetracker.Tracker
	state   *changetracker.State
	moved   chan switchNode
	nodes   map[string]*desired.Resolver // by switch
	rows    map[string]map[changetracker.ServicePortName]string
	written map[string]int
	fulls   int
}

// switchNode is the current node of a switch.
type switchNode struct {
	name string // of the switch
	node changetracker.Node
}

func newSwitches() (*switches, error) {
	tracker, err := changetracker.New(changetracker.Options{Families: []v1.IPFamily{v1.IPv4Protocol}})
	return &switches{
		tracker: tracker, moved: make(chan switchNode), nodes: map[string]*desired.Resolver{},
		rows: map[string]map[changetracker.ServicePortName]string{}, written: map[string]int{},
	}, err
}

func (s *switches) run(ctx context.Context) {
	for {
		select {
		case n := <-s.moved: // the tracker and the other switches are not involved
			s.nodes[n.name] = &desired.Resolver{Node: n.node, EditSelection: redirect}
			s.rewrite(n.name)
		case <-s.tracker.Changed():
			_ = s.tracker.Apply(v1.IPv4Protocol, s.apply)
		case <-ctx.Done():
			return
		}
	}
}

// redirect keeps a Service of the namespace local on each node that has an endpoint.
func redirect(_ changetracker.View, p *changetracker.ServicePort, s changetracker.Selection) changetracker.Selection {
	if p.Name.Namespace == "local" && len(s.Local) > 0 {
		s.Cluster = s.Local
	}
	return s
}

func (s *switches) apply(delta changetracker.Delta) (failed []changetracker.ServicePortName, err error) {
	s.state = delta.After
	for name := range s.nodes {
		if delta.Full {
			s.fulls++
			s.rewrite(name)
			continue
		}
		for _, c := range delta.Changes {
			s.write(name, c.Name)
		}
	}
	return nil, nil
}

// rewrite compares all rows of a switch.
func (s *switches) rewrite(name string) {
	if s.state == nil {
		return
	}
	for port := range s.rows[name] {
		s.write(name, port)
	}
	for port := range s.state.All() {
		s.write(name, port)
	}
}

func (s *switches) write(name string, port changetracker.ServicePortName) {
	row := ""
	if service, ok := s.nodes[name].Resolve(s.state, port); ok {
		row = rowOf(service)
	}
	if s.rows[name][port] == row {
		return
	}
	if s.rows[name] == nil {
		s.rows[name] = map[changetracker.ServicePortName]string{}
	}
	s.rows[name][port] = row
	s.written[name]++
}

// rowOf returns "VIP action: endpoints" for each frontend.
func rowOf(s *desired.Service) string {
	var texts []string
	for i := range s.Frontends {
		f := &s.Frontends[i]
		text := fmt.Sprintf("%s %v:", f.VIP, f.Action)
		for _, e := range s.Endpoints(f.Scope).Slice() {
			text += " " + e.Addr().String()
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, ", ")
}

// TestGlueOfOneProcessForAllNodes: policies, topology and a rule of its own are decided for
// each node, from one State.
func TestGlueOfOneProcessForAllNodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := newSwitches()
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		go s.run(ctx)
		service := func(namespace, name, addr string, options ...proxiertest.ServiceOption) {
			s.tracker.Services.Update(nil, proxiertest.Service(namespace, name,
				append(options, proxiertest.ClusterIPs(addr), proxiertest.Port("", v1.ProtocolTCP, 80))...))
		}
		slice := func(namespace, name string, endpoints ...proxiertest.SliceOption) {
			s.tracker.Endpoints.EndpointSliceUpdate(proxiertest.Slice(namespace, name, discovery.AddressTypeIPv4,
				append(endpoints, proxiertest.SlicePort("", v1.ProtocolTCP, 8080))...), false)
		}
		hinted := func(zone string) proxiertest.EndpointOption {
			return func(e *discovery.Endpoint) {
				e.Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: zone}}}
			}
		}
		// want checks the rows of each switch, and the switches written to since.
		want := func(when, written string, rows map[string]string) {
			t.Helper()
			synctest.Wait()
			if got := strings.Join(slices.Sorted(maps.Keys(s.written)), " "); got != written {
				t.Errorf("%s: wrote to %q, want %q", when, got, written)
			}
			clear(s.written)
			for name, want := range rows {
				if got := strings.Join(slices.Sorted(maps.Values(s.rows[name])), "; "); got != want {
					t.Errorf("%s: switch %s has\n%s, want\n%s", when, name, got, want)
				}
			}
		}
		node := func(name, zone string) changetracker.Node { return changetracker.Node{Name: name, Zone: zone} }
		for name, n := range map[string]changetracker.Node{"s1": node("n1", "a"), "s2": node("n2", "a"), "s3": node("n3", "b")} {
			s.moved <- switchNode{name, n}
		}
		service("shop", "web", "10.96.0.1", proxiertest.ExternalIPs("192.0.2.1"), proxiertest.ExternalPolicyLocal())
		service("shop", "zoned", "10.96.0.2")
		service("local", "dns", "10.96.0.3")
		slice("shop", "web", proxiertest.Endpoint("10.1.0.1", proxiertest.OnNode("n1")), proxiertest.Endpoint("10.3.0.1", proxiertest.OnNode("n3")))
		slice("shop", "zoned", proxiertest.Endpoint("10.1.0.2", hinted("a")), proxiertest.Endpoint("10.3.0.2", hinted("b")))
		slice("local", "dns", proxiertest.Endpoint("10.1.0.3", proxiertest.OnNode("n1")), proxiertest.Endpoint("10.2.0.3", proxiertest.OnNode("n2")))
		web := "10.96.0.1 forward: 10.1.0.1 10.3.0.1, 192.0.2.1 "
		want("at first", "s1 s2 s3", map[string]string{
			"s1": web + "forward: 10.1.0.1; 10.96.0.2 forward: 10.1.0.2; 10.96.0.3 forward: 10.1.0.3",
			"s2": web + "drop:; 10.96.0.2 forward: 10.1.0.2; 10.96.0.3 forward: 10.2.0.3",
			"s3": web + "forward: 10.3.0.1; 10.96.0.2 forward: 10.3.0.2; 10.96.0.3 forward: 10.1.0.3 10.2.0.3",
		})
		s.moved <- switchNode{"s3", node("n3", "a")}
		want("a node gets another zone", "s3", map[string]string{
			"s3": web + "forward: 10.3.0.1; 10.96.0.2 forward: 10.1.0.2; 10.96.0.3 forward: 10.1.0.3 10.2.0.3",
		})
		s.moved <- switchNode{"s2", node("n1", "a")}
		want("a node is renamed", "s2", map[string]string{
			"s2": web + "forward: 10.1.0.1; 10.96.0.2 forward: 10.1.0.2; 10.96.0.3 forward: 10.1.0.3",
		})
		s.moved <- switchNode{"s2", node("n2", "a")}
		want("and has its name again", "s2", nil)
		slice("local", "dns", proxiertest.Endpoint("10.1.0.3", proxiertest.OnNode("n1")), proxiertest.Endpoint("10.2.0.4", proxiertest.OnNode("n2")))
		want("a server is replaced, of which one node hears nothing", "s2 s3", map[string]string{
			"s1": web + "forward: 10.1.0.1; 10.96.0.2 forward: 10.1.0.2; 10.96.0.3 forward: 10.1.0.3",
			"s2": web + "drop:; 10.96.0.2 forward: 10.1.0.2; 10.96.0.3 forward: 10.2.0.4",
		})
		if s.fulls != len(s.nodes) {
			t.Errorf("%d full comparisons of switches, want one each", s.fulls)
		}
	})
}
