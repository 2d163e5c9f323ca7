package desired_test

import (
	"errors"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/oracle"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestRandomHistoriesAgreeWithTheOracle: Services, EndpointSlices and the node change at
// random, and syncs succeed or fail. A seed replays.
func TestRandomHistoriesAgreeWithTheOracle(t *testing.T) {
	seen := map[string]int{}
	for seed := range uint64(300) {
		r, history := rand.New(rand.NewPCG(seed, 16)), make([]byte, 1500)
		for i := range history {
			history[i] = byte(r.Uint32())
		}
		if replay(t, history, seen); t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
	for _, what := range []string{
		"ClusterIP forward", "ClusterIP drop", "ClusterIP reject", "LoadBalancer forward", "LoadBalancer drop", "LoadBalancer reject",
		"ExternalIP forward", "ExternalIP drop", "ExternalIP reject", "NodePort forward", "NodePort drop", "NodePort reject",
		"restricted", "short circuit", "lost", "refused", "on node", "failed", "changed", "unchanged", "all changed",
	} {
		if seen[what] < 100 {
			t.Errorf("%s: seen %d times, want 100 or more: the histories are too tame", what, seen[what])
		}
	}
}

// FuzzDesired reads the bytes as the decisions of a random history.
func FuzzDesired(f *testing.F) {
	f.Add([]byte("Services and EndpointSlices come, change and go"))
	f.Fuzz(func(t *testing.T, history []byte) { replay(t, history, map[string]int{}) })
}

// choices are decisions made by bytes; without bytes each is the first possibility.
type choices struct{ bytes []byte }

func (c *choices) below(n int) int {
	if len(c.bytes) == 0 {
		return 0
	}
	b := c.bytes[0]
	c.bytes = c.bytes[1:]
	return int(b) % n
}

func oneOf[T any](c *choices, from ...T) T { return from[c.below(len(from))] }

// rarely is the exception in one of eight cases.
func rarely[T any](c *choices, usual, exception T) T {
	if c.below(8) == 1 {
		return exception
	}
	return usual
}

func someOf[T any](c *choices, from ...T) (some []T) {
	chosen := c.below(1 << len(from))
	for i, item := range from {
		if chosen>>i&1 == 1 {
			some = append(some, item)
		}
	}
	return some
}

var serviceNames = []string{"a", "b", "c", "d"} // read-only

// world is a cluster with what a proxy makes of it.
type world struct {
	*testing.T
	*choices
	oracle.Cluster

	names   []changetracker.ServicePortName // that there may be
	tracker *changetracker.Tracker
	planes  map[v1.IPFamily]*plane
	seen    map[string]int
}

// plane is the data plane of a family: it has what Updates say, but for what fails.
type plane struct {
	updater    *desired.Updater
	programmed map[changetracker.ServicePortName]oracle.Decision
	owed       map[desired.Key]bool // frontends that it has had since an Update said that they are gone
	unsure     bool                 // the next Update must be full
	wanted     *desired.Resolved    // at the last sync
	// failing are the service ports that are not as the last Update wanted them, and endpoints what
	// the changes of the trackers have made of the lists that the plane has.
	failing   map[changetracker.ServicePortName]bool
	endpoints map[changetracker.ServicePortName][]changetracker.Endpoint
}

func replay(t *testing.T, history []byte, seen map[string]int) {
	w := &world{T: t, choices: &choices{history}, planes: map[v1.IPFamily]*plane{}, seen: seen}
	w.Cluster = oracle.Cluster{
		Services: map[string]*v1.Service{}, Slices: map[string]*discovery.EndpointSlice{}, Kinds: []string{"ClusterIP", "LoadBalancer", "ExternalIP", "NodePort"},
		DetectsPods: w.below(2) == 0, MasqueradeAll: w.below(4) == 1, StrictSourceRanges: w.below(2) == 0, DenyNodeExternalIPs: w.below(4) == 1,
		NodePortAddresses: prefixes(oneOf(w.choices, []string{"0.0.0.0/0", "::/0"}, []string{"192.0.2.0/28"}, nil)...),
	}
	if w.below(4) == 1 {
		w.ReservedExternalIPs = []netip.AddrPort{netip.MustParseAddrPort("203.0.113.1:80"), netip.MustParseAddrPort("[2001:db8::10]:80")}
	}
	if w.below(4) == 1 {
		w.Kinds = someOf(w.choices, w.Kinds...)
	}
	for _, service := range serviceNames {
		for _, protocol := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
			w.names = append(w.names, changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "ns", Name: service}, Port: "http", Protocol: protocol})
		}
	}
	w.tracker = w.newTracker()
	for _, family := range families() {
		w.planes[family] = &plane{
			updater: desired.NewUpdater(), owed: map[desired.Key]bool{}, unsure: true,
			failing: map[changetracker.ServicePortName]bool{}, endpoints: map[changetracker.ServicePortName][]changetracker.Endpoint{},
		}
	}
	for len(w.bytes) > 0 && !t.Failed() {
		if w.below(8) == 1 {
			w.planes[v1.IPv4Protocol].updater.Retry(oneOf(w.choices, w.names...))
		}
		w.change()
		if w.below(3) == 0 {
			w.sync(oneOf(w.choices, families()...))
		}
	}
	scratch := w.newTracker()
	scratch.SetNode(w.Node)
	for _, s := range w.Services {
		scratch.Services.Update(nil, s)
	}
	for _, s := range w.Slices {
		scratch.Endpoints.EndpointSliceUpdate(s, false)
	}
	for _, family := range families() {
		w.sync(family)
		_ = scratch.Apply(family, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
			w.checkResolved("from scratch", desired.NewResolved(delta.After, w.resolver(), w.globals()), oracle.Decide(&w.Cluster, family))
			return nil, nil
		})
	}
}

func families() []v1.IPFamily { return []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} }

func (w *world) newTracker() *changetracker.Tracker {
	tracker, err := changetracker.New(changetracker.Options{ObjectOptions: w.Tracker()})
	if err != nil {
		w.Fatal(err)
	}
	return tracker
}

func (w *world) resolver() desired.Resolver {
	r := desired.Resolver{Node: w.Node, MasqueradeAll: w.MasqueradeAll, DetectsPods: w.DetectsPods, DenyNodeExternalIPs: w.DenyNodeExternalIPs, ReservedExternalIPs: w.ReservedExternalIPs}
	for kind := desired.ClusterIP; kind <= desired.NodePort; kind++ {
		if slices.Contains(w.Kinds, kind.String()) {
			r.Kinds = append(r.Kinds, kind)
		}
	}
	if r.Kinds == nil { // would mean all
		r.Kinds = []desired.Kind{0}
	}
	return r
}

func (w *world) globals() desired.Globals {
	return desired.Globals{NodePortAddresses: w.NodePortAddresses, NodeAddresses: w.Node.Addresses}
}

func prefixes(texts ...string) (all []netip.Prefix) {
	for _, text := range texts {
		all = append(all, netip.MustParsePrefix(text))
	}
	return all
}

func addrs(texts ...string) (all []netip.Addr) {
	for _, text := range texts {
		all = append(all, netip.MustParseAddr(text))
	}
	return all
}

// change makes one event, and gives it to the tracker.
func (w *world) change() {
	name := oneOf(w.choices, serviceNames...)
	slice := name + oneOf(w.choices, "-1", "-2", "-6")
	switch w.below(16) {
	case 0:
		delete(w.Services, name)
		w.tracker.Services.Update(proxiertest.Service("ns", name), nil)
	case 1:
		delete(w.Slices, slice)
		w.tracker.Endpoints.EndpointSliceUpdate(proxiertest.Slice("ns", name, discovery.AddressTypeIPv4, proxiertest.SliceName(slice)), true)
	case 2:
		w.Node = changetracker.Node{
			Name: oneOf(w.choices, "here", "here.example.com", ""), Zone: oneOf(w.choices, "x", ""),
			Addresses: addrs(someOf(w.choices, "2001:db8::10", "192.0.2.20", "192.0.2.10", "127.0.0.1")...),
			PodCIDRs:  prefixes(someOf(w.choices, "10.244.1.0/24", "fd00:244:1::/48")...),
			Labels:    oracle.Pool(oneOf(w.choices, "a", "b")),
		}
		w.tracker.SetNode(w.Node)
	case 3, 4, 5, 6, 7, 8:
		w.Services[name] = w.service(name)
		w.tracker.Services.Update(nil, w.Services[name])
	default:
		if old := w.Slices[slice]; old != nil && w.below(3) == 1 { // deleted and created again
			w.Slices[slice] = old.DeepCopy()
			w.Slices[slice].CreationTimestamp.Time = time.Unix(int64(w.below(2)), 0)
		} else {
			w.Slices[slice] = w.slice(oneOf(w.choices, name, name, name, "a"), slice)
		}
		w.tracker.Endpoints.EndpointSliceUpdate(w.Slices[slice], false)
	}
}

func (w *world) protocols() []v1.Protocol {
	return oneOf(w.choices, []v1.Protocol{v1.ProtocolTCP}, []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP}, []v1.Protocol{v1.ProtocolUDP}, nil)
}

func (w *world) service(name string) *v1.Service {
	vips := []string{"192.0.2.10", "192.0.2.20", "203.0.113.1", "10.244.1.5", "2001:db8::10", "127.0.0.1", "0.0.0.0", "no address"}
	s := proxiertest.Service("ns", name, oneOf(w.choices,
		proxiertest.ClusterIPs(oneOf(w.choices, "10.96.0.1", "10.96.0.2", "192.0.2.20"), oneOf(w.choices, "fd00:96::1", "fd00:96::2")),
		proxiertest.ClusterIPs(oneOf(w.choices, "10.96.0.3", "fd00:96::3"))))
	for _, protocol := range w.protocols() {
		port, nodePort := oneOf[int32](w.choices, 80, 30080), oneOf[int32](w.choices, 0, 30080, 30081)
		if nodePort == 0 {
			proxiertest.Port("http", protocol, port)(s)
		} else {
			proxiertest.NodePort("http", protocol, port, nodePort)(s)
		}
	}
	proxiertest.ExternalIPs(someOf(w.choices, vips...)...)(s)
	if w.below(2) == 0 {
		proxiertest.LoadBalancer(someOf(w.choices, vips...)...)(s)
		proxiertest.SourceRanges(someOf(w.choices, "192.0.2.0/28", "192.0.2.0/24", "2001:db8::/32", "0.0.0.0/0", "no range")...)(s)
	}
	if w.below(4) == 0 {
		mode := v1.LoadBalancerIPModeProxy
		proxiertest.Ingress(v1.LoadBalancerIngress{IP: oneOf(w.choices, vips...), IPMode: &mode})(s)
	}
	edits := []proxiertest.ServiceOption{
		proxiertest.InternalPolicyLocal(), proxiertest.ExternalPolicyLocal(), proxiertest.ClientAffinity(time.Hour),
		proxiertest.Created(time.Unix(int64(1+w.below(2)), 0)),
	}
	for _, edit := range someOf(w.choices, edits...) {
		edit(s)
	}
	if w.below(3) == 1 {
		oracle.SetFailover(s, oneOf(w.choices, 0, 50, 100), w.below(2) == 1)
	}
	if w.below(4) == 1 {
		oracle.SetKeepFlows(s)
	}
	if w.below(4) == 1 {
		oracle.SetDenied(s, someOf(w.choices, "192.0.2.8/29", "192.0.2.10/32", "192.0.0.0/15", "2001:db8:7::/48", "::/1")...)
	}
	if w.below(6) == 1 {
		oracle.SetExposeOn(s, oneOf(w.choices, "a", "b"))
	}
	switch w.below(12) {
	case 1:
		proxiertest.Headless()(s)
	case 2:
		proxiertest.ExternalName("example.org")(s)
	case 3:
		s.Labels = map[string]string{changetracker.LabelServiceProxyName: "another"}
	}
	return s
}

func (w *world) slice(service, name string) *discovery.EndpointSlice {
	family, pods := discovery.AddressTypeIPv4, []string{"10.244.1.5", "10.244.2.6", "10.244.2.7", "169.254.0.1", "fd00:244:1::5"}
	if name[len(name)-1] == '6' {
		family, pods = discovery.AddressTypeIPv6, []string{"fd00:244:1::5", "fd00:244:2::6", "::1", "10.244.1.5"}
	}
	s := proxiertest.Slice("ns", service, family, proxiertest.SliceName(name))
	for _, protocol := range w.protocols() {
		proxiertest.SlicePort(rarely(w.choices, "http", "other"), protocol, rarely[int32](w.choices, 8080, 8081))(s)
	}
	hints := oneOf(w.choices, []string{"here", "there", "x", "y"}, nil)
	for _, address := range someOf(w.choices, pods...) {
		proxiertest.Endpoint(address)(s)
		e := &s.Endpoints[len(s.Endpoints)-1]
		if e.Conditions = (discovery.EndpointConditions{}); w.below(2) == 0 {
			condition := func() *bool { return oneOf(w.choices, nil, new(true), new(false)) }
			e.Conditions = discovery.EndpointConditions{Ready: condition(), Serving: condition(), Terminating: condition()}
		}
		e.Hostname = oneOf(w.choices, nil, nil, oracle.Group(1), oracle.Group(1), oracle.Group(7), oracle.Maintenance())
		if node := oneOf(w.choices, "here", "HERE.example.com.", "there", ""); node != "" {
			e.NodeName = &node
		}
		for _, hint := range someOf(w.choices, hints...) {
			if e.Hints == nil {
				e.Hints = &discovery.EndpointHints{}
			}
			e.Hints.ForNodes = append(e.Hints.ForNodes, discovery.ForNode{Name: hint})
			e.Hints.ForZones = append(e.Hints.ForZones, discovery.ForZone{Name: hint})
		}
	}
	s.CreationTimestamp.Time = time.Unix(int64(w.below(2)), 0)
	return s
}

// sync compares an Update with the oracle and programs it, wholly, in part or not at all.
func (w *world) sync(family v1.IPFamily) {
	p := w.planes[family]
	for _, name := range w.names {
		if p.failing[name] && w.below(3) == 1 {
			p.updater.Retry(name)
		}
	}
	_ = w.tracker.Apply(family, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
		u := p.updater.Next(delta, w.resolver(), w.globals(), p.unsure || w.below(8) == 1)
		w.checkResolved("acknowledged", u.Was, p.programmed)
		want := oracle.Decide(&w.Cluster, family)
		w.checkResolved("wanted", u.Now, want)
		w.checkChanged(p.wanted, u.Now)
		p.wanted = u.Now
		next, failed := w.program(p, &u)
		w.compare("programmed", next, w.wantedNow(p, &u, want))
		gone := maps.Clone(p.owed)
		for _, has := range []map[changetracker.ServicePortName]oracle.Decision{next, want} {
			for key := range keysOf(has) {
				delete(gone, key)
			}
		}
		if want := slices.SortedFunc(maps.Keys(gone), oracle.ByKey); !slices.Equal(u.Gone, want) {
			w.Errorf("%v are gone, want %v", u.Gone, want)
		}
		if p.unsure = w.below(8) == 1; p.unsure {
			return nil, errors.New("the sync failed")
		}
		w.acknowledge(p, &u, next, failed)
		for _, o := range p.updater.Done(failed) {
			is, has := p.programmed[o.Name]
			w.checkOne("is", o.Name, o.Is, is, has)
			if o.Failed != slices.Contains(failed, o.Name) {
				w.Errorf("%v failed: %t", o.Name, o.Failed)
			}
		}
		return nil, nil
	})
}

// wantedNow is what is wanted, but for service ports that failed and that the Update leaves as they are.
func (w *world) wantedNow(p *plane, u *desired.Update, want map[changetracker.ServicePortName]oracle.Decision) map[changetracker.ServicePortName]oracle.Decision {
	left := maps.Clone(p.failing)
	for i := range u.Changes {
		delete(left, u.Changes[i].Name)
	}
	want = maps.Clone(want)
	for name := range left {
		w.seen["left"]++
		if delete(want, name); hasKey(p.programmed, name) {
			want[name] = p.programmed[name]
		}
	}
	return want
}

func hasKey[K comparable, V any](m map[K]V, key K) bool {
	_, ok := m[key]
	return ok
}

// checkOne compares a service port with what the plane has of it, but for what it has lost.
func (w *world) checkOne(what string, name changetracker.ServicePortName, s *desired.Service, want oracle.Decision, has bool) {
	if (s != nil) != has {
		w.Errorf("%s: %v is there: %t, want %t", what, name, s != nil, has)
	}
	if s == nil || !has {
		return
	}
	got := decisionOf(s)
	if got.Lost, want.Lost = nil, nil; len(got.Frontends)+len(want.Frontends) == 0 {
		got.Frontends, want.Frontends = nil, nil
	}
	if !reflect.DeepEqual(got, want) {
		w.Errorf("%s: %v is\n%+v\nwant\n%+v", what, name, got, want)
	}
}

// follow returns the endpoints of a service port as a plane has them after a change.
func (w *world) follow(p *plane, u *desired.Update, c *desired.Change) []changetracker.Endpoint {
	now := u.Now.State().Endpoints(c.Name)
	if u.Full {
		return now
	}
	list := slices.Clone(p.endpoints[c.Name])
	if c.Source != nil {
		list = slices.DeleteFunc(list, func(e changetracker.Endpoint) bool {
			return slices.ContainsFunc(c.Source.Removed, func(gone changetracker.Endpoint) bool { return gone.Addr == e.Addr })
		})
		list = append(list, c.Source.Added...)
		slices.SortFunc(list, func(a, b changetracker.Endpoint) int { return a.Addr.Compare(b.Addr) })
	}
	if c.After != nil && !slices.EqualFunc(list, now, func(a, b changetracker.Endpoint) bool { return reflect.DeepEqual(a, b) }) {
		w.Errorf("the changes lead from %v\nto %v, want\n%v", p.endpoints[c.Name], list, now)
	}
	return list
}

// program returns what the plane would have after the Update, and what of it fails.
func (w *world) program(p *plane, u *desired.Update) (next map[changetracker.ServicePortName]oracle.Decision, failed []changetracker.ServicePortName) {
	next = maps.Clone(p.programmed)
	if next == nil {
		next = map[changetracker.ServicePortName]oracle.Decision{}
	}
	if u.Full {
		for name := range next {
			if !slices.ContainsFunc(u.Changes, func(c desired.Change) bool { return c.Name == name }) {
				w.Errorf("%v is not in a full Update", name)
			}
		}
	}
	for i, c := range u.Changes {
		was, had := p.programmed[c.Name]
		w.checkOne("was", c.Name, c.Before, was, had)
		if c.After != nil {
			next[c.Name] = decisionOf(c.After)
		} else if delete(next, c.Name); i > 0 && u.Changes[i-1].After != nil {
			w.Errorf("%v is gone after others", c.Name)
		}
		if w.below(8) == 1 {
			failed = append(failed, c.Name)
			w.seen["failed"]++
		}
	}
	return next, failed
}

// acknowledge: what failed is as it was, but for frontends that others have now.
func (w *world) acknowledge(p *plane, u *desired.Update, next map[changetracker.ServicePortName]oracle.Decision, failed []changetracker.ServicePortName) {
	for i := range u.Changes {
		c := &u.Changes[i]
		if delete(p.failing, c.Name); !slices.Contains(failed, c.Name) {
			p.endpoints[c.Name] = w.follow(p, u, c)
		} else if w.follow(p, u, c); u.Full && !hasKey(p.programmed, c.Name) {
			p.endpoints[c.Name] = nil
		}
	}
	for _, name := range failed {
		delete(next, name)
		p.failing[name] = true
	}
	taken := keysOf(next)
	for _, name := range failed {
		if d, had := p.programmed[name]; had {
			d.Frontends = slices.DeleteFunc(slices.Clone(d.Frontends), func(f oracle.Frontend) bool { return taken[f.Key] })
			next[name] = d
		}
	}
	for _, key := range u.Gone {
		delete(p.owed, key)
	}
	maps.Copy(p.owed, keysOf(next))
	p.programmed = next
}

func keysOf(all map[changetracker.ServicePortName]oracle.Decision) map[desired.Key]bool {
	keys := map[desired.Key]bool{}
	for _, d := range all {
		for _, f := range d.Frontends {
			keys[f.Key] = true
		}
	}
	return keys
}

// checkResolved compares all service ports, and the owner of each frontend.
func (w *world) checkResolved(what string, r *desired.Resolved, want map[changetracker.ServicePortName]oracle.Decision) {
	got := map[changetracker.ServicePortName]oracle.Decision{}
	for _, name := range w.names {
		if s, ok := r.Service(name); ok {
			got[name] = decisionOf(s)
		}
	}
	w.compare(what, got, want)
	all := 0
	for s := range r.All() {
		all++
		if one, ok := r.Service(s.Name); !ok || !reflect.DeepEqual(decisionOf(one), decisionOf(s)) {
			w.Errorf("%s: All has\n%+v\nand Service\n%+v", what, decisionOf(s), one)
		}
	}
	if all != len(got) {
		w.Errorf("%s: All has %d service ports, want %d", what, all, len(got))
	}
	for name, d := range want {
		for _, f := range d.Frontends {
			if owner, _ := r.Owner(f.Key); owner != name {
				w.Errorf("%s: %v is %v's, want %v's", what, f.Key, owner, name)
			}
		}
	}
}

// checkChanged: Changed names every Service that differs.
func (w *world) checkChanged(before, now *desired.Resolved) {
	names, all := now.Changed(before)
	if all {
		w.seen["all changed"]++
		return
	}
	for _, name := range w.names {
		was, had := before.Service(name)
		is, has := now.Service(name)
		differs := had != has || has && !reflect.DeepEqual(decisionOf(was), decisionOf(is)) ||
			!reflect.DeepEqual(before.State().Endpoints(name), now.State().Endpoints(name))
		switch named := slices.Contains(names, name.NamespacedName); {
		case differs && !named:
			w.Errorf("%v has changed, and Changed names only %v", name, names)
		case differs:
			w.seen["changed"]++
		case !named:
			w.seen["unchanged"]++
		}
	}
}

// compare: what service ports have lost matters only in what is wanted.
func (w *world) compare(what string, got, want map[changetracker.ServicePortName]oracle.Decision) {
	for _, name := range w.names {
		d, wanted := got[name], want[name]
		if what == "acknowledged" {
			d.Lost, wanted.Lost = nil, nil
		}
		if len(d.Frontends)+len(wanted.Frontends) == 0 {
			d.Frontends, wanted.Frontends = nil, nil
		}
		if !reflect.DeepEqual(d, wanted) {
			w.Errorf("%s: %v/%s is\n%+v, want\n%+v", what, name, name.Protocol, d, wanted)
		}
		w.count(&wanted)
	}
}

func (w *world) count(d *oracle.Decision) {
	for _, f := range d.Frontends {
		w.seen[f.Kind+" "+f.Action]++
		if f.Restricted {
			w.seen["restricted"]++
		}
		if f.ShortCircuit {
			w.seen["short circuit"]++
		}
	}
	w.seen["lost"] += len(d.Lost)
	w.seen["refused"] += len(d.Refused)
	w.seen["on node"] += len(d.OnNode)
}

// decisionOf is a Service in the oracle's terms.
func decisionOf(s *desired.Service) oracle.Decision {
	d := oracle.Decision{
		Affinity: s.Affinity, Cluster: s.Cluster.Slice(), Local: s.Local.Slice(), Serving: s.Serving.Slice(),
		OnNode: slices.Clone(s.OnNode), Refused: slices.Clone(s.Refused), Lost: slices.Clone(s.Lost),
	}
	for i := range s.Frontends {
		f := &s.Frontends[i]
		d.Frontends = append(d.Frontends, oracle.Frontend{
			Key: s.Key(f), Kind: f.Kind.String(), Action: f.Action.String(), Scope: f.Scope.String(), Masquerade: f.Masquerade.String(),
			ShortCircuit: f.ShortCircuit, Restricted: f.Restricted, Ranges: f.SourceRanges,
		})
	}
	return d
}
