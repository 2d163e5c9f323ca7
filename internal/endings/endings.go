// Package endings has the ways in which a pod of a Service can end, for tests of whoever waits until no node sends
// to the pod any more.
package endings

import (
	"fmt"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/proxiertest"
)

// Ending is a Service with a pod that ends on node-1, and what is around it. Each string is a value of its dimension.
type Ending struct {
	Policy, Topology, Clients, Others, Pod, Objects string

	// The test sets all below. Name is the name of the Service and of the pod.
	Name string
	// IP is the address of the pod, Near the address of the other endpoint if it is on node-1, Far if it is elsewhere.
	IP, Near, Far string
}

// String says all values.
func (e *Ending) String() string {
	return fmt.Sprintf("policy %s, %s, %s, other endpoints: %s, the pod is %s, objects: %s", e.Policy, e.Topology, e.Clients, e.Others, e.Pod, e.Objects)
}

// dimensions are the values of each field. The first one is the usual one.
func dimensions() [][]string {
	return [][]string{
		{"Cluster", "internal Local", "external Local", "both Local"},
		{"no hints", "zones", "same node"},
		{"any clients", "clients stay"},
		{
			"on another node", "none", "on the same node", "not ready", "ending", "ending, not serving", "without its port", "with weight 0",
			"at an invalid address", "of IPv6", "ejected",
		},
		{"listed once", "listed twice", "not named", "of another kind"},
		// Deleted before: the hook sees no EndpointSlice, and one node is behind.
		{"known", "late", "deleted before", "listed again", "late at one node"},
	}
}

func of(values []string) *Ending {
	return &Ending{Policy: values[0], Topology: values[1], Clients: values[2], Others: values[3], Pod: values[4], Objects: values[5]}
}

// All returns every combination.
func All() (all []*Ending) {
	for values := range combinations(dimensions()) {
		all = append(all, of(values))
	}
	return all
}

// Pairs returns few Endings that have every pair of values of two dimensions.
func Pairs() (all []*Ending) {
	type pair struct {
		i, j int
		a, b string
	}
	pairs := func(values []string, each func(pair)) {
		for i := range values {
			for j := range i {
				each(pair{i, j, values[i], values[j]})
			}
		}
	}
	var left [][]string
	missing := map[pair]bool{}
	for values := range combinations(dimensions()) {
		left = append(left, slices.Clone(values))
		pairs(values, func(p pair) { missing[p] = true })
	}
	news := func(values []string) (n int) {
		pairs(values, func(p pair) {
			if missing[p] {
				n++
			}
		})
		return n
	}
	for len(missing) > 0 {
		most, best := 0, left[0]
		for _, values := range left {
			if n := news(values); n > most {
				most, best = n, values
			}
		}
		pairs(best, func(p pair) { delete(missing, p) })
		all = append(all, of(best))
	}
	return all
}

// combinations yields one value of each dimension. The slice is valid until the next one.
func combinations(dimensions [][]string) func(yield func([]string) bool) {
	values := make([]string, len(dimensions))
	var from func(i int, yield func([]string) bool) bool
	from = func(i int, yield func([]string) bool) bool {
		if i == len(dimensions) {
			return yield(values)
		}
		for _, values[i] = range dimensions[i] {
			if !from(i+1, yield) {
				return false
			}
		}
		return true
	}
	return func(yield func([]string) bool) { from(0, yield) }
}

// Service returns the Service, with what a test adds: its addresses and ports, which are web-tcp and web-udp.
func (e *Ending) Service(options ...proxiertest.ServiceOption) *v1.Service {
	if e.Policy == "internal Local" || e.Policy == "both Local" {
		options = append(options, proxiertest.InternalPolicyLocal())
	}
	if e.Policy == "external Local" || e.Policy == "both Local" {
		options = append(options, proxiertest.ExternalPolicyLocal())
	}
	if e.Clients == "clients stay" {
		options = append(options, proxiertest.ClientAffinity(time.Hour))
	}
	return proxiertest.Service("shop", e.Name, options...)
}

// Slices returns the EndpointSlices, with the pod in a condition; nil means ready. The names of those with other
// endpoints end in -others.
func (e *Ending) Slices(condition proxiertest.EndpointOption) []*discovery.EndpointSlice {
	pod := proxiertest.Endpoint(e.IP, proxiertest.OnNode("node-1"), e.hints("node-1"), func(at *discovery.Endpoint) {
		switch e.Pod {
		case "listed once", "listed twice":
			at.TargetRef = &v1.ObjectReference{Kind: "Pod", Name: e.Name}
		case "of another kind":
			at.TargetRef = &v1.ObjectReference{Kind: "VirtualMachine", Name: "x"}
		}
		if condition != nil {
			condition(at)
		}
	})
	all := []*discovery.EndpointSlice{e.slice("pod", pod)}
	if e.Pod == "listed twice" {
		all = append(all, e.slice("again", pod))
	}
	if e.Others != "none" {
		all = append(all, e.others())
	}
	return all
}

func (e *Ending) slice(name string, options ...proxiertest.SliceOption) *discovery.EndpointSlice {
	options = append([]proxiertest.SliceOption{
		proxiertest.SliceName(e.Name + "-" + name), proxiertest.SlicePort("web-tcp", v1.ProtocolTCP, 8080), proxiertest.SlicePort("web-udp", v1.ProtocolUDP, 8080),
	}, options...)
	return proxiertest.Slice("shop", e.Name, discovery.AddressTypeIPv4, options...)
}

// others returns the EndpointSlice of the other endpoint.
func (e *Ending) others() *discovery.EndpointSlice {
	address, node := e.Far, "node-2"
	var condition proxiertest.EndpointOption = func(*discovery.Endpoint) {}
	var change proxiertest.SliceOption = func(*discovery.EndpointSlice) {}
	switch e.Others {
	case "on the same node":
		address, node = e.Near, "node-1"
	case "not ready":
		condition = func(at *discovery.Endpoint) { at.Conditions.Ready = new(bool) }
	case "ending":
		condition = proxiertest.Terminating()
	case "ending, not serving":
		condition = proxiertest.NotServing()
	case "without its port":
		change = func(s *discovery.EndpointSlice) {
			for i := range s.Ports {
				s.Ports[i].Name = new("another" + *s.Ports[i].Name)
			}
		}
	case "at an invalid address":
		address = "169.254.0.1"
	case "of IPv6":
		address = "fd00:244::1"
		change = func(s *discovery.EndpointSlice) { s.AddressType = discovery.AddressTypeIPv6 }
	}
	return e.slice("others", proxiertest.Endpoint(address, proxiertest.OnNode(node), e.hints(node), condition), change)
}

// hints gives an endpoint the zone of its node, and the hints of the topology: node-2 is in another zone.
func (e *Ending) hints(node string) proxiertest.EndpointOption {
	zone := Zone(node)
	return func(at *discovery.Endpoint) {
		at.Zone = &zone
		switch e.Topology {
		case "zones":
			at.Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: zone}}}
		case "same node":
			at.Hints = &discovery.EndpointHints{ForNodes: []discovery.ForNode{{Name: node}}}
		}
	}
}

// Zone returns the zone of a node.
func Zone(node string) string {
	if node == "node-2" {
		return "zone-b"
	}
	return "zone-a"
}
