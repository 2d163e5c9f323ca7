package changetracker

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// sourceModel is the content of one Source.
type sourceModel struct {
	services map[string][]ServicePort
	slices   map[string]*discovery.EndpointSlice
	own      map[ServicePortName][]Endpoint
}

func newSourceModel() *sourceModel {
	return &sourceModel{
		services: map[string][]ServicePort{}, slices: map[string]*discovery.EndpointSlice{}, own: map[ServicePortName][]Endpoint{},
	}
}

// manySources is a tracker with three Sources, and their content.
type manySources struct {
	tracker *Tracker
	models  map[string]*sourceModel
}

var sourceNames = []string{"", "east", "west"}

func servicePortName(service string, key portKey) ServicePortName {
	return ServicePortName{NamespacedName: types.NamespacedName{Namespace: web.Namespace, Name: service}, Port: key.port, Protocol: key.protocol}
}

func sourcePort(from, service string, key portKey, family v1.IPFamily) ServicePort {
	vip := netip.AddrFrom4([4]byte{10, 96, byte(len(from)), service[0]})
	if family == v1.IPv6Protocol {
		vip = netip.AddrFrom16([16]byte{0: 0xfd, 14: byte(len(from)), 15: service[0]})
	}
	return ServicePort{Name: servicePortName(service, key), Family: family, ClusterIP: vip, Port: 80}
}

// sourcePorts returns random service ports of a Service, or none.
func sourcePorts(r *rand.Rand, from, service string) (ports []ServicePort) {
	for _, key := range randomPorts(r) {
		for _, family := range pick(r, []v1.IPFamily{v1.IPv4Protocol}, []v1.IPFamily{v1.IPv6Protocol}, []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol}) {
			ports = append(ports, sourcePort(from, service, key, family))
		}
	}
	return ports
}

func sourceEndpoints(r *rand.Rand) (list []Endpoint) {
	for _, addr := range []string{"10.0.0.1:8080", "10.0.0.2:8080", "10.0.0.3:8080", "[fd00::1]:8080"} {
		if r.IntN(2) == 0 {
			list = append(list, Endpoint{
				Addr: addrPort(addr), Ready: r.IntN(2) == 0, Serving: true, Terminating: r.IntN(3) == 0,
				Node: pick(r, "", "n0", "n1"), NodeHints: pick(r, nil, []string{"n0"}, []string{"n0", "n1"}), Weight: pick[uint16](r, 0, 2),
			})
		}
	}
	return list
}

func sourceSlice(r *rand.Rand, name string) *discovery.EndpointSlice {
	s := webSlice(name)
	s.Labels[discovery.LabelServiceName], s.CreationTimestamp = pick(r, "a", "b"), metav1.Unix(int64(r.IntN(2)), 0)
	s.Ports = nil
	for _, p := range randomPorts(r) {
		s.Ports = append(s.Ports, endpointPort(p.port, p.protocol, 8080))
	}
	for _, e := range sourceEndpoints(r) {
		if e.Addr.Addr().Is4() {
			api := at(e.Addr.Addr().String(), conditions(e.Ready, e.Serving, e.Terminating), onNode(e.Node))
			api.Hints = &discovery.EndpointHints{}
			for _, n := range e.NodeHints {
				api.Hints.ForNodes = append(api.Hints.ForNodes, discovery.ForNode{Name: n})
			}
			s.Endpoints = append(s.Endpoints, api)
		}
	}
	return s
}

// event changes a Source and its model.
func (w *manySources) event(r *rand.Rand) (what string, changed, exact bool, err error) {
	from, name, slice := pick(r, sourceNames...), pick(r, "a", "b"), pick(r, "s1", "s2")
	m, s := w.models[from], w.tracker.Source(from)
	key, exact := types.NamespacedName{Namespace: web.Namespace, Name: name}, true
	switch r.IntN(8) {
	case 0:
		what, m.services[name] = "set "+name, sourcePorts(r, from, name)
		changed, err = s.Services.Set(key, m.services[name]...)
	case 1:
		what = "update " + name
		m.services[name] = []ServicePort{sourcePort(from, name, portKey{"http", "TCP"}, v1.IPv4Protocol)}
		changed = s.Services.Update(nil, webService(func(s *v1.Service) {
			s.Name, s.Spec.IPFamilies = name, nil
			s.Spec.ClusterIP = m.services[name][0].ClusterIP.String()
		}))
	case 2:
		what = "delete " + name
		delete(m.services, name)
		changed = s.Services.Delete(key)
	case 3:
		what, m.slices[slice] = "slice "+slice, sourceSlice(r, slice)
		changed = s.Endpoints.EndpointSliceUpdate(m.slices[slice], false)
	case 4:
		what = "no slice " + slice
		delete(m.slices, slice)
		changed = s.Endpoints.EndpointSliceUpdate(sourceSlice(r, slice), true)
	case 5:
		port := servicePortName(name, portKey{"http", "TCP"})
		what, m.own[port] = "endpoints of "+name, sourceEndpoints(r)
		changed, err = s.Endpoints.Set(port, m.own[port]...)
	case 6:
		what, exact = "replace", len(m.slices) == 0
		next := newSourceModel()
		var ports []ServicePort
		for _, name := range []string{"a", "b"} {
			next.services[name] = sourcePorts(r, from, name)
			ports = append(ports, next.services[name]...)
			if port := servicePortName(name, portKey{"http", "TCP"}); r.IntN(2) == 0 {
				next.own[port] = sourceEndpoints(r)
			}
		}
		w.models[from] = next
		changed, err = s.Replace(ports, next.own)
	case 7:
		what = "replace by what is bad"
		if changed, err = s.Replace(append(sourcePorts(r, from, "a"), ServicePort{}), nil); err == nil {
			return what, changed, exact, errors.New("no error")
		}
		err = nil
	}
	return fmt.Sprintf("%q: %s", from, what), changed, exact, err
}

// want builds a State naively: from scratch, comparing every record.
func (w *manySources) want(family v1.IPFamily) string {
	var lines []string
	for _, name := range []string{"a", "b"} {
		for _, from := range sourceNames {
			ports := slices.DeleteFunc(slices.Clone(w.models[from].services[name]), func(p ServicePort) bool { return p.Family != family })
			for _, p := range ports {
				lines = append(lines, p.Name.String()+string(p.Name.Protocol)+" "+p.String()+w.endpoints(p.Name, family))
			}
			if len(ports) > 0 {
				break
			}
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

func (w *manySources) endpoints(name ServicePortName, family v1.IPFamily) (text string) {
	type candidate struct {
		Endpoint

		created    int64
		from, name string
	}
	best := map[netip.AddrPort]candidate{}
	consider := func(c candidate) {
		known, is := best[c.Addr]
		if familyOf(c.Addr.Addr()) != family || is && cmp.Or(cmp.Compare(known.rank(), c.rank()), cmp.Compare(known.created, c.created),
			strings.Compare(c.from, known.from), strings.Compare(c.name, known.name)) >= 0 {
			return
		}
		best[c.Addr] = c
	}
	const never = -62135596800 // the zero time
	for from, m := range w.models {
		for _, e := range m.own[name] {
			consider(candidate{Endpoint: e, created: never, from: from})
		}
		for sliceName, s := range m.slices {
			has := slices.ContainsFunc(s.Ports, func(p discovery.EndpointPort) bool { return *p.Name == name.Port && *p.Protocol == name.Protocol })
			if s.Labels[discovery.LabelServiceName] != name.Name || !has {
				continue
			}
			for _, api := range s.Endpoints {
				c := candidate{created: s.CreationTimestamp.Unix(), from: from, name: sliceName}
				c.Addr = netip.AddrPortFrom(netip.MustParseAddr(api.Addresses[0]), 8080)
				c.Ready, c.Serving, c.Terminating, c.Node = *api.Conditions.Ready, *api.Conditions.Serving, *api.Conditions.Terminating, *api.NodeName
				for _, hint := range api.Hints.ForNodes {
					c.NodeHints = append(c.NodeHints, hint.Name)
				}
				consider(c)
			}
		}
	}
	for _, addr := range slices.SortedFunc(maps.Keys(best), netip.AddrPort.Compare) {
		c := best[addr]
		prefix := func(node string) string {
			if c.from == "" || node == "" {
				return node
			}
			return c.from + "/" + node
		}
		hints := []string{}
		for _, hint := range c.NodeHints {
			hints = append(hints, prefix(hint))
		}
		text += fmt.Sprintf("\n  %v on %q hints %q", &c.Endpoint, prefix(c.Node), hints)
	}
	return text
}

func statesText(s *State) string {
	var lines []string
	for name, p := range s.All() {
		line := name.String() + string(name.Protocol) + " " + p.String()
		for _, e := range s.Endpoints(name) {
			line += fmt.Sprintf("\n  %v on %q hints %q", &e, e.Node, slices.Concat([]string{}, e.NodeHints))
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// Sources agree with a naive model over random histories, with Applies that fail.
func TestSourcesAgreeWithANaiveModel(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		w := &manySources{tracker: mustTracker(t), models: map[string]*sourceModel{}}
		for _, from := range sourceNames {
			w.models[from] = newSourceModel()
		}
		all := func() string { return w.want(v1.IPv4Protocol) + w.want(v1.IPv6Protocol) }
		var history []string
		for range 30 {
			before := all()
			what, changed, exact, err := w.event(r)
			history = append(history, what)
			if differs := all() != before; err != nil || differs && !changed || exact && changed != differs {
				t.Fatalf("seed %d, %s: changed = %v, %v, want %v", seed, strings.Join(history, ", "), changed, err, differs)
			}
			for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
				apply := peek
				if r.IntN(2) == 0 {
					apply = applyAll
				}
				if state, _ := apply(t, w.tracker, family); statesText(state) != w.want(family) {
					t.Fatalf("seed %d, %s: state =\n%s\nwant\n%s", seed, strings.Join(history, ", "), statesText(state), w.want(family))
				}
			}
		}
		for _, from := range sourceNames { // nothing is left when all are empty
			if _, err := w.tracker.Source(from).Replace(nil, nil); err != nil {
				t.Fatal(err)
			}
		}
		applyAll(t, w.tracker, v1.IPv4Protocol)
		applyAll(t, w.tracker, v1.IPv6Protocol)
		if got, want := sizes(w.tracker), sizes(mustTracker(t)); got != want {
			t.Fatalf("seed %d: sizes = %s after all is gone, want %s", seed, got, want)
		}
	}
}

// An error of Replace names every invalid value, and nothing has changed.
func TestAnErrorOfReplaceNamesEverything(t *testing.T) {
	tracker := mustTracker(t, func(o *Options) { o.AwaitSources = []string{"west"} })
	west := tracker.Source("west")
	good := ServicePort{Name: http, ClusterIP: netip.MustParseAddr("10.96.0.10"), Port: 80}
	bad := good
	bad.Name.Name, bad.Port = "api", 0
	changed, err := west.Replace(
		[]ServicePort{good, bad, good},
		map[ServicePortName][]Endpoint{http: {{Addr: addrPort("10.0.0.1:80")}, {Addr: addrPort("127.0.0.1:80"), Ready: true}}, {}: nil},
	)
	if changed || err == nil {
		t.Fatalf("Replace = %v, %v, want an error", changed, err)
	}
	for _, part := range []string{
		`replace the content of source "west": `, "default/api:http: Port: invalid value 0", "default/web:http: listed twice",
		"endpoints of default/web:http: endpoint 10.0.0.1:80: it would get no traffic", "127.0.0.1:80 is a loopback", `protocol: invalid value ""`,
	} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%v: want a part %s", err, part)
		}
	}
	if got, want := sizes(tracker), sizes(mustTracker(t)); got != want || !slices.Contains(tracker.Waiting(), SourceInput("west")) {
		t.Errorf("sizes = %s, waiting for %v, want %s and no less than before", got, tracker.Waiting(), want)
	}
	if changed, err = west.Replace([]ServicePort{good}, nil); !changed || err != nil || slices.Contains(tracker.Waiting(), SourceInput("west")) {
		t.Errorf("Replace = %v, %v, and waits for %v, want west no more", changed, err, tracker.Waiting())
	}
	if changed, err = west.Replace([]ServicePort{good}, nil); changed || err != nil {
		t.Errorf("Replace by the same = %v, %v, want no change", changed, err)
	}
	if changed, err = tracker.Source("").Replace(nil, nil); changed || err != nil || !tracker.isReady() {
		t.Errorf("Replace of the tracker's own = %v, %v, and waits for %v, want nothing", changed, err, tracker.Waiting())
	}
}

// An Apply that runs during Replace sees all of its content or nothing: the version is in the
// service port and in both of its endpoints.
func TestAReplacementIsSeenWhole(t *testing.T) {
	tracker := mustTracker(t)
	var feeding sync.WaitGroup
	defer feeding.Wait()
	const last = 200
	feeding.Go(func() {
		for version := uint16(1); version <= last; version++ {
			endpoint := func(addr string) Endpoint {
				return Endpoint{Addr: netip.AddrPortFrom(netip.MustParseAddr(addr), version), Ready: true}
			}
			_, err := tracker.Source("west").Replace(
				[]ServicePort{{Name: http, ExternalIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, Port: version}},
				map[ServicePortName][]Endpoint{http: {endpoint("10.0.0.1"), endpoint("10.0.0.2")}},
			)
			if err != nil {
				t.Error(err)
			}
		}
	})
	for seen := uint16(0); seen < last; {
		<-tracker.Changed()
		state, _ := applyAll(t, tracker, v1.IPv4Protocol)
		p, ok := state.Service(http)
		if !ok {
			continue
		}
		seen = p.Port
		ports := map[uint16]int{}
		for _, e := range state.Endpoints(http) {
			ports[e.Addr.Port()]++
		}
		if ports[seen] != 2 || len(ports) != 1 {
			t.Fatalf("version %d has endpoints at ports %v, want two at %d", seen, ports, seen)
		}
	}
}

// Nodes of another cluster are different nodes, even with the names of ours.
func TestNodesOfAnotherClusterAreOthers(t *testing.T) {
	hinted := func(e *discovery.Endpoint) {
		e.Hints = &discovery.EndpointHints{ForNodes: []discovery.ForNode{{Name: "here"}}}
	}
	for name, give := range map[string]func(s *Source) error{
		"slices": func(s *Source) error {
			s.Endpoints.EndpointSliceUpdate(webSlice("s", at("10.0.0.1", onNode("here"), hinted)), false)
			return nil
		},
		"by hand": func(s *Source) error {
			_, err := s.Endpoints.Set(http, Endpoint{Addr: addrPort("10.0.0.1:8080"), Ready: true, Node: "here", NodeHints: []string{"here"}})
			return err
		},
	} {
		for from, node := range map[string]string{"": "here", "west": "west/here"} {
			tracker := mustTracker(t)
			tracker.Services.Update(nil, webService(func(s *v1.Service) { s.Spec.InternalTrafficPolicy = new(v1.ServiceInternalTrafficPolicyLocal) }))
			if err := give(tracker.Source(from)); err != nil {
				t.Fatal(err)
			}
			state, _ := applyAll(t, tracker, v1.IPv4Protocol)
			list := state.Endpoints(http)
			if len(list) != 1 || list[0].Node != node || !slices.Equal(list[0].NodeHints, []string{node}) {
				t.Fatalf("%s of %q: %+v, want one on %s", name, from, list, node)
			}
			for _, n := range []string{"here", "west/here"} {
				selected, _ := state.For(Node{Name: n}).Select(http)
				if local := len(selected.Local) > 0; local != (n == node) {
					t.Errorf("%s of %q: local to %s = %v, want %v", name, from, n, local, n == node)
				}
			}
		}
	}
}

// Problems of Sources are separate, and end with their objects.
func TestProblemsOfSources(t *testing.T) {
	tracker := mustTracker(t)
	for _, from := range []string{"", "west"} {
		tracker.Source(from).Services.Update(nil, webService(func(s *v1.Service) { s.Spec.ExternalIPs = []string{"bad"} }))
		tracker.Source(from).Endpoints.EndpointSliceUpdate(webSlice("s", at("bad")), false)
	}
	objects := func() (list []string) {
		for _, p := range tracker.Problems() {
			list = append(list, p.Object)
		}
		return list
	}
	own := []string{"EndpointSlice default/s", "Service default/web"}
	both := []string{own[0], own[0] + " of source west", own[1], own[1] + " of source west"}
	if got := objects(); !slices.Equal(got, both) {
		t.Errorf("problems of %q, want %q", got, both)
	}
	if _, err := tracker.Source("west").Replace(nil, nil); err != nil {
		t.Fatal(err)
	}
	if got := objects(); !slices.Equal(got, own) {
		t.Errorf("problems of %q after west is empty, want %q", got, own)
	}
}
