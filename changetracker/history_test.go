package changetracker

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/internal/chance"
)

// step is one event of a random history. Its seed decides its details, so that a
// history can be shortened without changing the other steps.
type step struct {
	what verb
	seed uint64
}

type verb int

const (
	putService verb = iota
	deleteService
	setService
	putSlice
	removeSlice
	setEndpoints
	relist
	setNode
	override
	refresh
	applyFully
	applyPartly
	applyInVain
	verbs
)

func (s step) String() string {
	names := [verbs]string{
		"putService", "deleteService", "setService", "putSlice", "removeSlice", "setEndpoints", "relist", "setNode", "override", "refresh",
		"applyFully", "applyPartly", "applyInVain",
	}
	return fmt.Sprintf("{%s, %#x}", names[s.what], s.seed)
}

// replica is what the receiver of Deltas stores for one family.
type replica map[ServicePortName]replicaPort

type replicaPort struct {
	port      *ServicePort
	endpoints map[netip.AddrPort]Endpoint
}

// change applies one Change to the replica, and checks that it fits.
func (r replica) change(c PortChange, refreshed bool) error {
	was := r[c.Name]
	switch {
	case (was.port == nil) != (c.Before == nil):
		return fmt.Errorf("%v: Before = %v, want %v", c.Name, c.Before, was.port)
	case was.port != nil && !was.port.Equal(c.Before):
		return fmt.Errorf("%v: Before = %v, want %v", c.Name, dumpPort(c.Before), dumpPort(was.port))
	}
	next := replicaPort{port: c.After, endpoints: maps.Clone(was.endpoints)}
	if next.endpoints == nil {
		next.endpoints = map[netip.AddrPort]Endpoint{}
	}
	for _, e := range c.Removed {
		if held, ok := next.endpoints[e.Addr]; !ok || !held.Equal(&e) {
			return fmt.Errorf("%v: Removed has %s, want one of %v", c.Name, dumpEndpoint(e), next.endpoints)
		}
		delete(next.endpoints, e.Addr)
	}
	for _, e := range c.Added {
		if held, ok := next.endpoints[e.Addr]; ok {
			return fmt.Errorf("%v: Added has %s, but there is %s", c.Name, dumpEndpoint(e), dumpEndpoint(held))
		}
		next.endpoints[e.Addr] = e
	}
	if !refreshed && len(c.Added)+len(c.Removed) == 0 && was.port != nil && c.After != nil && was.port.Equal(c.After) {
		return fmt.Errorf("%v: the Change is none", c.Name)
	}
	delete(r, c.Name)
	if next.port != nil || len(next.endpoints) > 0 {
		r[c.Name] = next
	}
	return nil
}

func (r replica) dump() string {
	var lines []string
	for name, p := range r {
		line := fmt.Sprintf("%s/%s %s", name, name.Protocol, dumpPort(p.port))
		for _, e := range slices.SortedFunc(maps.Values(p.endpoints), compareByAddr) {
			line += "\n    " + dumpEndpoint(e)
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n") + "\n"
}

// world is a cluster, a tracker that follows it, and the receivers of its Deltas.
type world struct {
	tracker  *Tracker
	node     Node
	services map[string]*v1.Service
	handmade map[string][]ServicePort
	slices   map[string]*discovery.EndpointSlice
	own      map[ServicePortName][]Endpoint
	replicas map[v1.IPFamily]replica
	// states are all States so far, which must not change.
	states []*State
	// twin receives the same slices, but has no overrides and hooks: its endpoints are the
	// input of these.
	twin      *world
	overrides map[overridden]Override
	moods     map[ServicePortName]mood
	refreshed map[v1.IPFamily]map[ServicePortName]bool
	fault     error
	mode
}

// overridden identifies the endpoint of an Override.
type overridden struct {
	name  ServicePortName
	addr  netip.AddrPort
	owner string
}

// mode is how a history is replayed.
type mode struct {
	// watch reads the State before and after every event, to check "changed". Changes do
	// not accumulate then, so half of the histories do without.
	watch bool
	// endpointsOnly has no Services, like an EndpointChangeTracker.
	endpointsOnly bool
	// shapes uses overrides, and edits also EditEndpoints. They may hide differences, so
	// "changed" may be true without one.
	shapes, edits bool
	// parts is the Size of each Part; 0 is all.
	parts int
}

func newWorld(m mode) *world {
	w := newPlainWorld(m)
	if m.shapes {
		w.twin = newPlainWorld(mode{endpointsOnly: m.endpointsOnly})
	}
	if m.edits {
		w.tracker.store.options.EditEndpoints = func(p *ServicePort, list []Endpoint) []Endpoint {
			return w.moods[p.Name].edit(p, list)
		}
	}
	return w
}

func newPlainWorld(m mode) *world {
	tracker, err := New(Options{Node: Node{Name: "n0"}, Families: bothFamilies(), ObjectOptions: ObjectOptions{DecorateEndpoint: weigh, IndexEndpoints: true}})
	if err != nil {
		panic(err)
	}
	tracker.store.endpointsOnly = m.endpointsOnly
	return &world{
		tracker: tracker, node: Node{Name: "n0"}, mode: m, overrides: map[overridden]Override{}, moods: map[ServicePortName]mood{},
		services: map[string]*v1.Service{}, handmade: map[string][]ServicePort{},
		slices: map[string]*discovery.EndpointSlice{}, own: map[ServicePortName][]Endpoint{},
		replicas:  map[v1.IPFamily]replica{v1.IPv4Protocol: {}, v1.IPv6Protocol: {}},
		refreshed: map[v1.IPFamily]map[ServicePortName]bool{v1.IPv4Protocol: {}, v1.IPv6Protocol: {}},
	}
}

// weigh derives the weight of an endpoint from its zone, as a program would from an
// annotation.
func weigh(e *Endpoint, api *discovery.Endpoint, _ *discovery.EndpointSlice) {
	if api.Zone != nil {
		e.Weight, e.Zone = uint16(len(*api.Zone)), ""
	}
}

func bothFamilies() []v1.IPFamily { return []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} }

func pick[T any](r *rand.Rand, from ...T) T { return from[r.IntN(len(from))] }

func randomService(r *rand.Rand, name string) *v1.Service {
	s := webService(func(s *v1.Service) {
		s.Name = name
		s.Spec.Type = pick(r, v1.ServiceTypeClusterIP, v1.ServiceTypeLoadBalancer, v1.ServiceTypeExternalName, "")
		s.Spec.ClusterIP = pick(r, "10.96.0.10", "10.96.0.10", "10.96.0.10", "None", "")
		s.Spec.ClusterIPs = pick(r, []string{"10.96.0.10", "fd00::10"}, []string{"10.96.0.10"}, []string{"10.96.0.10", "bad"})
		s.Spec.ExternalTrafficPolicy = pick(r, v1.ServiceExternalTrafficPolicyLocal, "")
		s.Spec.HealthCheckNodePort = pick[int32](r, 0, 31000, 31001)
		s.Spec.ExternalIPs = pick(r, nil, nil, []string{"192.0.2.1"}, []string{"192.0.2.1", "192.0.2.2", "2001:db8::1"}, []string{"10.96.0.10"})
		s.Spec.Ports = nil
	})
	for _, ip := range pick(r, nil, nil, []string{"192.0.2.1", "203.0.113.1"}, []string{"203.0.113.1", "2001:db8::2"}) {
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: ip})
	}
	for _, p := range randomPorts(r) {
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{
			Name: p.port, Protocol: p.protocol, Port: pick[int32](r, 80, 80, 81, 0), NodePort: pick[int32](r, 0, 31000, 31002),
		})
	}
	if r.IntN(8) == 0 {
		s.Labels = map[string]string{LabelServiceProxyName: "other"}
	}
	return s
}

func randomPorts(r *rand.Rand) (ports []portKey) {
	for _, k := range []portKey{{"", "TCP"}, {"http", "TCP"}, {"http", "UDP"}} {
		if r.IntN(2) == 0 {
			ports = append(ports, k)
		}
	}
	r.Shuffle(len(ports), func(i, j int) { ports[i], ports[j] = ports[j], ports[i] })
	return ports
}

func randomAddr(r *rand.Rand) string {
	return pick(r, "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "010.0.0.1", "fd00::1", "fd00::2", "fd00:0::1", "bad")
}

func randomSlice(r *rand.Rand, name string) *discovery.EndpointSlice {
	s := &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: web.Namespace, Name: name, CreationTimestamp: metav1.Unix(int64(r.IntN(2)), 0),
			Labels: map[string]string{discovery.LabelServiceName: pick(r, "a", "a", "b", "c", "")},
		},
		AddressType: pick(r, discovery.AddressTypeIPv4, discovery.AddressTypeIPv4, discovery.AddressTypeIPv6, discovery.AddressTypeFQDN),
	}
	for _, p := range randomPorts(r) {
		s.Ports = append(s.Ports, endpointPort(p.port, p.protocol, pick[int32](r, 8080, 8080, 8081)))
	}
	if len(s.Ports) > 0 && r.IntN(4) == 0 { // one name, two numbers
		again := s.Ports[0]
		again.Port = pick(r, new(int32(8080)), new(int32(8079)))
		s.Ports = append(s.Ports, again)
	}
	for range r.IntN(5) {
		s.Endpoints = append(s.Endpoints, at(randomAddr(r), onNode(pick(r, "n0", "n1", "")),
			conditions(r.IntN(3) > 0, r.IntN(2) == 0, r.IntN(3) == 0), inZone(pick(r, "", "", "1", "22", "333"))))
	}
	return s
}

// run replays a history and returns the first fault.
func run(history []step, m mode) error {
	w := newWorld(m)
	for i, s := range history {
		if err := w.play(s); err != nil {
			return fmt.Errorf("step %d %v: %w", i, s, err)
		}
	}
	return w.finish()
}

func (w *world) play(s step) error {
	r := rand.New(rand.NewPCG(s.seed, 0))
	if w.endpointsOnly && s.what <= setService || !w.shapes && s.what == override || !w.edits && s.what == refresh {
		return nil
	}
	if s.what >= applyFully {
		return w.apply(r, s.what)
	}
	var before string
	if w.watch {
		before = w.look()
	}
	changed, err := w.event(r, s.what)
	if w.twin != nil && s.what < relist {
		_, _ = w.twin.event(rand.New(rand.NewPCG(s.seed, 0)), s.what)
	}
	if err != nil || !w.watch {
		return err
	}
	if after := w.look(); changed != (before != after) && (!changed || !w.shapes) {
		return fmt.Errorf("changed = %v, from\n%sto\n%s", changed, before, after)
	}
	return w.fault
}

// look returns what an Apply would receive.
func (w *world) look() (text string) {
	for _, family := range bothFamilies() {
		_ = w.tracker.Apply(family, func(delta Delta) ([]ServicePortName, error) {
			s := delta.After
			text += dump(s)
			w.fault = errors.Join(w.fault, w.checkShape(s))
			return nil, errTest
		})
	}
	return text + fmt.Sprint(w.tracker.store.node)
}

func (w *world) event(r *rand.Rand, what verb) (changed bool, err error) {
	name := pick(r, "a", "b", "c")
	key := types.NamespacedName{Namespace: web.Namespace, Name: name}
	slice := pick(r, "s1", "s2", "s3", "s4")
	services, endpoints := w.tracker.Services, w.tracker.Endpoints
	switch what {
	case putService:
		delete(w.handmade, name)
		w.services[name] = randomService(r, name)
		return services.Update(nil, w.services[name]), nil
	case deleteService:
		delete(w.handmade, name)
		delete(w.services, name)
		return services.Delete(key), nil
	case setService:
		delete(w.services, name)
		w.handmade[name] = nil
		for _, p := range randomPorts(r) {
			port := pick(r, ServicePort{ClusterIP: netip.MustParseAddr("10.96.0.99")}, ServicePort{ClusterIP: netip.MustParseAddr("fd00::99")},
				ServicePort{ExternalIPs: []netip.Addr{netip.MustParseAddr("192.0.2.99")}}, ServicePort{NodePort: 30099, Family: v1.IPv6Protocol})
			port.Name, port.Port = ServicePortName{key, p.port, p.protocol}, 99
			w.handmade[name] = append(w.handmade[name], port)
		}
		return services.Set(key, w.handmade[name]...)
	case putSlice:
		w.slices[slice] = randomSlice(r, slice)
		return endpoints.EndpointSliceUpdate(w.slices[slice], false), nil
	case removeSlice:
		gone := randomSlice(r, slice) // with any content
		delete(w.slices, slice)
		return endpoints.EndpointSliceUpdate(gone, true), nil
	case setEndpoints:
		port := ServicePortName{key, "http", "TCP"}
		w.own[port] = nil
		for range r.IntN(3) {
			w.own[port] = append(w.own[port], Endpoint{
				Addr:  netip.MustParseAddrPort(pick(r, "10.0.0.1:8080", "10.0.0.9:8080", "[fd00::1]:8080")),
				Ready: r.IntN(2) == 0, Serving: true, Node: pick(r, "", "n0", "n1"), Weight: pick[uint16](r, 0, 1, 2),
			})
		}
		return endpoints.Set(port, w.own[port]...)
	case relist:
		return false, w.relist(w.tracker)
	case setNode:
		was := w.node
		w.node = Node{Name: pick(r, "n0", "n1", ""), Zone: pick(r, "", "z")}
		if w.twin != nil {
			w.twin.tracker.SetNode(w.node)
		}
		return !was.equal(&w.node), w.checkSetNode(was)
	case override:
		for _, of := range w.targets(r, key) {
			changed = w.override(of, pick(r, Override{}, Override{}, Override{Eject: true}, Override{Eject: true}, Override{Scale: 1},
				Override{Eject: true, Scale: 5}, Override{Scale: 40000})) || changed
		}
		return changed, nil
	case refresh:
		port := randomPort(r, key)
		w.moods[port] = mood(r.IntN(int(moods)))
		changed = w.tracker.Refresh(port)
		for _, family := range bothFamilies() {
			w.refreshed[family][port] = w.refreshed[family][port] || changed
		}
		return changed, nil
	case applyFully, applyPartly, applyInVain, verbs:
	}
	panic("not an event")
}

func (w *world) checkSetNode(was Node) error {
	if got, want := w.tracker.SetNode(w.node), !was.equal(&w.node); got != want {
		return fmt.Errorf("SetNode = %v, want %v", got, want)
	}
	return nil
}

// relist delivers all objects again, and returns an error if that is a change.
func (w *world) relist(to *Tracker) error {
	changed := ""
	for name, s := range w.services {
		if to.Services.Update(nil, s.DeepCopy()) {
			changed += " Service " + name
		}
	}
	for name, ports := range w.handmade {
		if ok, err := to.Services.Set(types.NamespacedName{Namespace: web.Namespace, Name: name}, ports...); ok || err != nil {
			changed += fmt.Sprint(" hand-built Service ", name, err)
		}
	}
	for name, s := range w.slices {
		s = s.DeepCopy()
		slices.Reverse(s.Ports)
		if to.Endpoints.EndpointSliceUpdate(s, false) {
			changed += " slice " + name
		}
	}
	for name, list := range w.own {
		if ok, err := to.Endpoints.Set(name, list...); ok || err != nil {
			changed += fmt.Sprint(" hand-built endpoints ", name, err)
		}
	}
	for of, o := range w.overrides {
		if o.By = of.owner; to.Override(of.name, of.addr, o) {
			changed += fmt.Sprint(" override of ", of)
		}
	}
	if changed != "" && to == w.tracker {
		return fmt.Errorf("identical again, but changed:%s", changed)
	}
	return nil
}

func (w *world) apply(r *rand.Rand, what verb) error {
	family := pick(r, bothFamilies()...)
	held := w.replicas[family]
	var fault error
	more := false
	err := w.tracker.ApplyPart(family, Part{Size: w.parts}, func(d Delta) ([]ServicePortName, error) {
		s := d.After
		more = d.More
		if got, want := dump(d.Before), held.dump(); got != want {
			fault = errors.Join(fault, fmt.Errorf("%s: Before is\n%swant what was applied\n%s", family, got, want))
		}
		next := maps.Clone(held)
		var failed []ServicePortName
		for i, c := range d.Changes {
			if i > 0 && d.Changes[i-1].Name.Compare(c.Name) >= 0 {
				fault = errors.Join(fault, fmt.Errorf("changes are not sorted: %v", outline(d)))
			}
			fault = errors.Join(fault, next.change(c, w.refreshed[family][c.Name]))
			if what == applyPartly && r.IntN(2) == 0 {
				failed = append(failed, c.Name)
			}
		}
		if got, want := next.dump(), dump(s); got != want {
			fault = errors.Join(fault, fmt.Errorf("%s: the Deltas add up to\n%swant the State\n%s", family, got, want))
		}
		fault = errors.Join(fault, checkState(s))
		if !more {
			fault = errors.Join(fault, w.checkShape(s), w.checkRefreshed(d))
		}
		w.states = append(w.states, s)
		if what == applyInVain {
			return nil, errTest
		}
		w.replicas[family] = next
		maps.DeleteFunc(w.refreshed[family], func(name ServicePortName, _ bool) bool {
			left := more && !slices.ContainsFunc(d.Changes, func(c PortChange) bool { return c.Name == name })
			return !left && !slices.Contains(failed, name)
		})
		if what == applyFully {
			return nil, nil
		}
		for _, name := range failed {
			restore(next, held, name)
		}
		return failed, nil
	})
	if (err != nil) != (what == applyInVain) {
		fault = errors.Join(fault, fmt.Errorf("Apply = %w", err))
	}
	if what == applyFully && w.tracker.PendingSince(family).IsZero() == more {
		fault = errors.Join(fault, fmt.Errorf("pending since %v after a success that has left more: %v", w.tracker.PendingSince(family), more))
	}
	return fault
}

// checkRefreshed returns an error if a refreshed service port is not in the Delta.
func (w *world) checkRefreshed(delta Delta) error {
	for name, asked := range w.refreshed[delta.After.Family()] {
		_, exists := delta.After.Service(name)
		if asked && exists && !slices.ContainsFunc(delta.Changes, func(c PortChange) bool { return c.Name == name }) {
			return fmt.Errorf("%v was refreshed, but the changes are %v", name, outline(delta))
		}
	}
	return nil
}

func restore(next, held replica, name ServicePortName) {
	delete(next, name)
	if p, ok := held[name]; ok {
		next[name] = p
	}
}

// checkState compares the counts of a State with its content.
func checkState(s *State) error {
	ports, health := 0, map[types.NamespacedName]uint16{}
	local := map[types.NamespacedName]map[netip.Addr]bool{}
	for name, p := range s.All() {
		ports++
		if got, ok := s.Service(name); !ok || got != p {
			return fmt.Errorf("Service(%v) = %v, want %v", name, got, p)
		}
		if !slices.Contains(s.ServicePorts(name.NamespacedName), name) {
			return fmt.Errorf("ServicePorts(%v) lacks %v", name.NamespacedName, name)
		}
		if p.HealthCheckNodePort != 0 {
			health[name.NamespacedName] = p.HealthCheckNodePort
		}
	}
	view := s.For(Node{Name: "n0"})
	for name, service := range s.services.All() {
		local[name] = map[netip.Addr]bool{}
		for _, p := range service.ports {
			for _, e := range s.Endpoints(p.name) {
				if e.Node == "n0" && e.Ready {
					local[name][e.Addr.Addr()] = true
				}
			}
		}
	}
	for name, want := range local {
		if got := view.LocalReady(name); got != len(want) {
			return fmt.Errorf("LocalReady(%v) = %d, want %d", name, got, len(want))
		}
	}
	if s.Len() != ports || !maps.Equal(s.HealthCheckNodePorts(), health) {
		return fmt.Errorf("Len, HealthCheckNodePorts = %d, %v, want %d, %v", s.Len(), s.HealthCheckNodePorts(), ports, health)
	}
	for name, want := range health {
		if got := s.HealthCheckNodePort(name); got != want {
			return fmt.Errorf("HealthCheckNodePort(%v) = %d, want %d", name, got, want)
		}
	}
	return checkLookups(s)
}

// finish compares with a tracker that received only the last version of each object.
func (w *world) finish() error {
	fresh := newWorld(mode{endpointsOnly: w.endpointsOnly, shapes: w.shapes, edits: w.edits})
	fresh.tracker.SetNode(w.node)
	if err := w.relist(fresh.tracker); err != nil {
		return err
	}
	if w.twin != nil {
		fresh.twin, fresh.overrides, fresh.moods = w.twin, maps.Clone(w.overrides), w.moods
	}
	if got, want := w.tracker.Problems(), fresh.tracker.Problems(); !slices.Equal(got, want) {
		return fmt.Errorf("problems = %v, want %v", got, want)
	}
	r := rand.New(rand.NewPCG(0, 0))
	for range 10 { // both families, some time
		if err := errors.Join(w.apply(r, applyFully), fresh.apply(r, applyFully)); err != nil {
			return err
		}
	}
	for i, s := range w.states {
		if err := checkState(s); err != nil {
			return fmt.Errorf("State %d, after more Applies: %w", i, err)
		}
	}
	if got, want := w.look(), fresh.look(); got != want {
		return fmt.Errorf("state =\n%sof a fresh tracker\n%s", got, want)
	}
	return errors.Join(w.fault, fresh.fault)
}

// shorten drops steps as long as the history fails without them.
func shorten(history []step, fails func([]step) bool) []step {
	for chunk := len(history) / 2; chunk > 0; {
		shorter := false
		for start := 0; start+chunk <= len(history); {
			without := slices.Concat(history[:start], history[start+chunk:])
			if fails(without) {
				history, shorter = without, true
			} else {
				start += chunk
			}
		}
		if !shorter {
			chunk /= 2
		}
	}
	return history
}

func TestAnyHistoryEndsInTheStateOfItsLastObjects(t *testing.T) {
	histories := chance.Few(500, 1_500)
	for seed := range uint64(histories) {
		r := rand.New(rand.NewPCG(seed, 7))
		history := make([]step, 1+r.IntN(60))
		for i := range history {
			history[i] = step{what: verb(r.IntN(int(verbs))), seed: r.Uint64N(1 << 20)}
		}
		m := mode{watch: seed%2 == 0, endpointsOnly: seed%3 == 0, shapes: seed%5 < 3, edits: seed%5 == 0, parts: int(seed % 4)}
		if err := run(history, m); err != nil {
			short := shorten(history, func(h []step) bool { return run(h, m) != nil })
			t.Fatalf("seed %d, %+v: %v\nshortened to %v: %v", seed, m, err, short, run(short, m))
		}
	}
}

func TestShortenFindsTheStepsThatMatter(t *testing.T) {
	history := make([]step, 40)
	for i := range history {
		history[i].seed = uint64(i)
	}
	got := shorten(history, func(h []step) bool {
		return slices.Contains(h, step{seed: 3}) && slices.Contains(h, step{seed: 31})
	})
	if want := []step{{seed: 3}, {seed: 31}}; !slices.Equal(got, want) {
		t.Errorf("shortened to %v, want %v", got, want)
	}
}
