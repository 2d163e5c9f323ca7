package changetracker

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// mood is what EditEndpoints does with a service port.
type mood int

const (
	keeps mood = iota
	prefersOneNode
	adds
	panics
	clears
	moods
)

// extra is the endpoint that the mood adds.
func extra(p *ServicePort) Endpoint {
	e := Endpoint{Addr: netip.MustParseAddrPort("10.0.0.0:8080"), Ready: true, Weight: 7}
	if p.Family == v1.IPv6Protocol {
		e.Addr = netip.MustParseAddrPort("[fd09::9]:8080")
	}
	return e
}

func isPreferred(e Endpoint) bool { return e.Node == "n0" }

func (m mood) edit(p *ServicePort, list []Endpoint) []Endpoint {
	switch m {
	case prefersOneNode:
		if !slices.ContainsFunc(list, isPreferred) {
			return list
		}
		return slices.DeleteFunc(list, func(e Endpoint) bool { return !isPreferred(e) })
	case adds:
		unready := extra(p)
		unready.Ready, unready.Terminating = false, true
		list = append(list, extra(p), unready, Endpoint{}, Endpoint{Addr: netip.MustParseAddrPort("224.0.0.1:80"), Ready: true})
		slices.Reverse(list)
		return list
	case panics:
		clear(list)
		panic("bug")
	case clears:
		return nil
	case keeps, moods:
	}
	return list
}

// expect returns the endpoints of a port in that mood.
func (m mood) expect(p *ServicePort, list map[netip.AddrPort]Endpoint) map[netip.AddrPort]Endpoint {
	next, preferred := map[netip.AddrPort]Endpoint{}, false
	for _, e := range list {
		preferred = preferred || isPreferred(e)
	}
	for addr, e := range list {
		if m != clears && (m != prefersOneNode || isPreferred(e) || !preferred) {
			next[addr] = e
		}
	}
	if m == adds {
		next[extra(p).Addr] = extra(p)
	}
	return next
}

func randomPort(r *rand.Rand, name types.NamespacedName) ServicePortName {
	return ServicePortName{name, pick(r, "http", "http", "http", ""), pick(r, v1.ProtocolTCP, v1.ProtocolTCP, v1.ProtocolUDP)}
}

// targets returns some endpoints of one service port, or one that may not exist.
func (w *world) targets(r *rand.Rand, name types.NamespacedName) (targets []overridden) {
	_ = w.twin.tracker.Apply(pick(r, bothFamilies()...), func(delta Delta) ([]ServicePortName, error) {
		service, _ := delta.After.services.Get(name)
		ports := service.all()
		if len(ports) == 0 {
			return nil, errTest
		}
		p := pick(r, ports...)
		for _, e := range p.endpoints.Slice() {
			if r.IntN(3) > 0 {
				targets = append(targets, overridden{p.name, e.Addr, pick(r, owners()...)})
			}
		}
		return nil, errTest
	})
	if len(targets) > 0 && r.IntN(8) > 0 {
		return targets
	}
	addr := pick(r, "10.0.0.1:8080", "10.0.0.2:8080", "[fd00::1]:8080")
	return []overridden{{randomPort(r, name), netip.MustParseAddrPort(addr), pick(r, owners()...)}}
}

func owners() []string { return []string{"", "another"} }

func (w *world) override(of overridden, o Override) (changed bool) {
	if o == (Override{}) {
		delete(w.overrides, of)
	} else {
		w.overrides[of] = o
	}
	o.By = of.owner
	return w.tracker.Override(of.name, of.addr, o)
}

// checkShape holds a State against what is given to overrides and hooks, which is what
// the twin has.
func (w *world) checkShape(s *State) (err error) {
	if w.twin == nil {
		return nil
	}
	_ = w.twin.tracker.Apply(s.Family(), func(delta Delta) ([]ServicePortName, error) {
		w.endOverrides(delta.After)
		if got, want := dump(s), w.shaped(delta.After).dump(); got != want {
			err = fmt.Errorf("overrides %v, moods %v: state =\n%swant\n%s", w.overrides, w.moods, got, want)
		}
		return nil, errTest
	})
	return err
}

func (w *world) endOverrides(plain *State) {
	for of := range w.overrides {
		has := slices.ContainsFunc(plain.Endpoints(of.name), func(e Endpoint) bool { return e.Addr == of.addr })
		if familyOf(of.addr.Addr()) == plain.Family() && !has {
			delete(w.overrides, of)
		}
	}
}

func (w *world) shaped(plain *State) replica {
	r := replica{}
	for _, service := range plain.services.All() {
		for _, p := range service.ports {
			list, left, heaviest := map[netip.AddrPort]Endpoint{}, 0, 0
			weights, ejected := map[netip.AddrPort]int{}, map[netip.AddrPort]bool{}
			for _, e := range p.endpoints.Slice() {
				list[e.Addr], weights[e.Addr] = e, max(int(e.Weight), 1)
				for _, owner := range owners() {
					of := w.overrides[overridden{p.name, e.Addr, owner}]
					weights[e.Addr] *= max(int(of.Scale), 1)
					ejected[e.Addr] = ejected[e.Addr] || of.Eject
				}
				heaviest = max(heaviest, weights[e.Addr])
				if (e.Ready || e.Serving && e.Terminating) && !ejected[e.Addr] {
					left++
				}
			}
			for addr, e := range list {
				if ejected[addr] && left > 0 {
					e.Ready, e.Serving = false, false
				}
				if heaviest > 65535 {
					weights[addr] = max(1, weights[addr]*65535/heaviest)
				}
				if e.Weight = uint16(weights[addr]); e.Weight == 1 {
					e.Weight = 0
				}
				list[addr] = e
			}
			if p.port != nil && w.edits {
				list = w.moods[p.name].expect(p.port, list)
			}
			r[p.name] = replicaPort{port: p.port, endpoints: list}
		}
	}
	return r
}
