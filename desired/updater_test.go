package desired

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
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
)

// plane is a data plane behind an Updater that fails now and then.
type plane struct {
	*rand.Rand
	*testing.T

	tracker *changetracker.Tracker
	kinds   []Kind
	updater *Updater
	has     map[changetracker.ServicePortName]*Service
	// owed are the Keys that somebody has had, and that nobody has said are gone.
	owed   map[Key]bool
	unsure bool // the next Update must be full
}

func nameOf(text string) changetracker.ServicePortName {
	return changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "test", Name: text}, Protocol: v1.ProtocolTCP}
}

// TestUpdaterIsHeldAgainstAModel: random Services that ask for the same frontends come, go
// and change while service ports fail, and everything does.
func TestUpdaterIsHeldAgainstAModel(t *testing.T) {
	for seed := range uint64(30) {
		tracker, err := changetracker.New(changetracker.Options{Families: []v1.IPFamily{v1.IPv4Protocol}})
		if err != nil {
			t.Fatal(err)
		}
		p := &plane{
			Rand: rand.New(rand.NewPCG(seed, 1)), T: t, tracker: tracker, updater: NewUpdater(nameOf("c").NamespacedName), unsure: true,
			has: map[changetracker.ServicePortName]*Service{}, owed: map[Key]bool{},
		}
		p.kinds = oneOf(p.Rand, nil, nil, []Kind{ClusterIP, ExternalIP}, []Kind{NodePort, LoadBalancer, ExternalIP})
		for range 60 {
			p.change()
			if p.IntN(3) > 0 {
				_ = tracker.Apply(v1.IPv4Protocol, p.apply)
			}
		}
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func (p *plane) change() {
	i := byte(p.IntN(5))
	name := nameOf(string('a' + rune(i)))
	switch p.IntN(8) {
	case 0:
		p.tracker.Services.Delete(name.NamespacedName)
	case 1:
		node := changetracker.Node{Name: "here", Addresses: [][]netip.Addr{nil, {nodeIP}, {nodeIP, externalIP}}[p.IntN(3)]}
		p.tracker.SetNode(node)
	case 2, 3:
		_, err := p.tracker.Endpoints.Set(name, [][]changetracker.Endpoint{nil, {remote(1)}, {local(1), remote(2)}}[p.IntN(3)]...)
		p.must(err)
	default:
		port := changetracker.ServicePort{
			Name: name, ClusterIP: netip.AddrFrom4([4]byte{10, 96, 0, i}), Port: []uint16{80, 30080}[p.IntN(2)],
			NodePort: []uint16{0, 30080}[p.IntN(2)], ExternalPolicyLocal: p.IntN(3) == 0,
		}
		for _, addr := range []netip.Addr{nodeIP, externalIP, vip} {
			switch p.IntN(5) {
			case 0:
				port.LoadBalancerVIPs = append(port.LoadBalancerVIPs, addr)
			case 1, 2:
				port.ExternalIPs = append(port.ExternalIPs, addr)
			}
		}
		if age := p.IntN(3); age > 0 {
			port.CreationTimestamp = time.Unix(int64(age), 0).UTC()
		}
		_, err := p.tracker.Services.Set(name.NamespacedName, port)
		p.must(err)
	}
}

func (p *plane) must(err error) {
	if err != nil {
		p.Fatal(err)
	}
}

var errTotal = errors.New("everything failed")

func (p *plane) apply(step changetracker.Step) ([]changetracker.ServicePortName, error) {
	node := step.After.Node()
	globals := Globals{NodePortAddresses: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}, NodeAddresses: node.Addresses}
	u := p.updater.Next(step, Resolver{Node: node, Kinds: p.kinds}, globals, p.unsure || p.IntN(8) == 0)
	p.checkWas(&u)
	p.checkNow(&u)
	p.checkGone(&u)
	if p.unsure = p.IntN(8) == 0; p.unsure {
		return nil, errTotal
	}
	failed := p.program(&u)
	return p.updater.Done(failed), nil
}

// program does what an engine does, but for some service ports.
func (p *plane) program(u *Update) (failed []changetracker.ServicePortName) {
	next := maps.Clone(p.has)
	if u.Full {
		clear(next)
	}
	for _, c := range u.Changes {
		if p.IntN(4) == 0 {
			failed = append(failed, c.Name, c.Name)
		} else if next[c.Name] = c.After; c.After == nil {
			delete(next, c.Name)
		}
	}
	for _, name := range failed { // they are as they were, but for what others have got
		if before := p.has[name]; before != nil {
			rest := *before
			rest.Frontends = slices.DeleteFunc(slices.Clone(before.Frontends), func(f Frontend) bool {
				return slices.ContainsFunc(slices.Collect(maps.Values(next)), func(s *Service) bool {
					return !slices.Contains(failed, s.Name) && s.find(before.Key(&f)) != nil
				})
			})
			next[name] = &rest
		}
	}
	p.has = next
	for _, key := range u.Gone {
		delete(p.owed, key)
	}
	for _, s := range p.has {
		for i := range s.Frontends {
			p.owed[s.Key(&s.Frontends[i])] = true
		}
	}
	return failed
}

func (p *plane) checkWas(u *Update) {
	for _, text := range []string{"a", "b", "c", "d", "e"} {
		name := nameOf(text)
		was, ok := u.Was.Service(name)
		has := p.has[name]
		if ok != (has != nil) || ok && !same(was, has) {
			p.Errorf("%v was %+v, want what is acknowledged, %+v", name, was, has)
		}
		for i := 0; ok && i < len(was.Frontends); i++ {
			if owner, _ := u.Was.Owner(was.Key(&was.Frontends[i])); owner != name {
				p.Errorf("%v was %v's, want %v's", was.Key(&was.Frontends[i]), owner, name)
			}
		}
	}
}

// same compares all that is programmed.
func same(a, b *Service) bool {
	x, y := *a, *b
	x.Lost, y.Lost = nil, nil
	if len(x.Frontends)+len(y.Frontends) == 0 {
		x.Frontends, y.Frontends = nil, nil
	}
	return reflect.DeepEqual(x, y)
}

// checkNow holds what all would be after the Update against a walk through all claims.
func (p *plane) checkNow(u *Update) {
	after := maps.Clone(p.has)
	if u.Full {
		clear(after)
	}
	group := -2
	for _, c := range u.Changes {
		if after[c.Name] = c.After; c.After == nil {
			delete(after, c.Name)
			if group > -2 || u.Full {
				p.Errorf("%v is gone after others, or in a full Update", c.Name)
			}
			continue
		}
		group = -1
	}
	want := naive(u)
	if len(after) != len(want) {
		p.Errorf("%d service ports after the Update, want %d", len(after), len(want))
	}
	for name, s := range want {
		now, _ := u.Now.Service(name)
		if !reflect.DeepEqual(now, s) || after[name] == nil || !reflect.DeepEqual(after[name].Lost, s.Lost) || !same(after[name], s) {
			p.Errorf("%v is %+v now, and %+v after the Update, want %+v", name, now, after[name], s)
		}
	}
}

// naive says who gets what, by a walk through all that all ask for.
func naive(u *Update) map[changetracker.ServicePortName]*Service {
	first, all := map[Key]Claim{}, map[changetracker.ServicePortName]*Service{}
	for name := range u.Now.state.All() {
		s, _ := u.Now.resolver.Resolve(u.Now.state, name)
		all[name] = s
		for i := range s.Frontends {
			key, claim := s.Key(&s.Frontends[i]), claimOf(s.Port, s.Frontends[i].Kind)
			if best, asked := first[key]; !asked || claim.Compare(best) < 0 {
				first[key] = claim
			}
		}
	}
	winner := map[Key]changetracker.ServicePortName{}
	for key, claim := range first {
		winner[key] = claim.Name
		if there, asked := first[Key{Protocol: key.Protocol, Port: key.Port}]; asked && u.Globals.AcceptsNodePorts(key.VIP) && claim.YieldsTo(there) {
			winner[key] = there.Name
		}
	}
	for name, s := range all {
		var lost []Key
		for i := range s.Frontends {
			for key, owner := range winner {
				nodePort := s.Frontends[i].Kind == NodePort && winner[s.Key(&s.Frontends[i])] == name &&
					key.Port == s.Frontends[i].Port && u.Globals.AcceptsNodePorts(key.VIP)
				if owner != name && (key == s.Key(&s.Frontends[i]) || nodePort) && !slices.Contains(lost, key) {
					lost = append(lost, key)
				}
			}
		}
		slices.SortFunc(lost, Key.Compare)
		all[name] = s.without(lost)
	}
	return all
}

func (p *plane) checkGone(u *Update) {
	gone := maps.Clone(p.owed)
	for _, s := range naive(u) {
		for i := range s.Frontends {
			delete(gone, s.Key(&s.Frontends[i]))
		}
	}
	if want := slices.SortedFunc(maps.Keys(gone), Key.Compare); !slices.Equal(u.Gone, want) {
		p.Errorf("full %t: %v are gone, want %v", u.Full, u.Gone, want)
	}
}

// TestOneThatGivesUpAFrontendComesFirst, so that the next one finds it free, unless it is
// to be there at once.
func TestOneThatGivesUpAFrontendComesFirst(t *testing.T) {
	tracker, err := changetracker.New(changetracker.Options{Families: []v1.IPFamily{v1.IPv4Protocol}})
	if err != nil {
		t.Fatal(err)
	}
	updater := NewUpdater(nameOf("b").NamespacedName)
	set := func(name string, addrs ...netip.Addr) {
		port := changetracker.ServicePort{Name: nameOf(name), ClusterIP: netip.AddrFrom4([4]byte{10, 96, 0, name[0]}), Port: 80, ExternalIPs: addrs}
		if _, err := tracker.Services.Set(port.Name.NamespacedName, port); err != nil {
			t.Error(err)
		}
	}
	want := func(when, names string) {
		t.Helper()
		_ = tracker.Apply(v1.IPv4Protocol, func(step changetracker.Step) ([]changetracker.ServicePortName, error) {
			got := ""
			for _, c := range updater.Next(step, Resolver{}, Globals{}, false).Changes {
				got += c.Name.Name
			}
			if got != names {
				t.Errorf("%s: the order is %s, want %s", when, got, names)
			}
			return updater.Done(nil), nil
		})
	}
	set("a")
	set("b")
	set("c", vip)
	set("d")
	want("at first", "bacd")
	set("a", vip)
	set("b", externalIP)
	set("c")
	tracker.Services.Delete(nameOf("d").NamespacedName)
	want("c gives its VIP to a", "dcba")
	set("b", externalIP, vip)
	want("the older name has it", "b")
	set("0", vip)
	want("an even smaller name takes it from a", "a0")
}
