package proxier_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// engineOf has what an engine would have in the kernel: what it was asked to program and did not refuse.
type engineOf struct {
	has     map[changetracker.ServicePortName]*desired.Service
	refuses func(name changetracker.ServicePortName) bool
}

func (e *engineOf) apply(u desired.Update) (result proxier.Result, err error) {
	if u.Full {
		named := map[changetracker.ServicePortName]bool{}
		for i := range u.Changes {
			named[u.Changes[i].Name] = true
		}
		for name := range e.has {
			if !named[name] {
				return result, fmt.Errorf("a full Update lacks %v", name)
			}
		}
	}
	for i := range u.Changes {
		c := &u.Changes[i]
		if e.refuses(c.Name) {
			result.Failed = append(result.Failed, &proxier.ServiceError{Name: c.Name, Err: errors.New("refused")})
			continue
		}
		delete(e.has, c.Name)
		if c.After != nil {
			for _, other := range e.has { // loses what this one gets
				other.Frontends = slices.DeleteFunc(slices.Clone(other.Frontends), func(f desired.Frontend) bool {
					return slices.ContainsFunc(c.After.Frontends, func(taken desired.Frontend) bool { return other.Key(&f) == c.After.Key(&taken) })
				})
			}
			copied := *c.After
			e.has[c.Name] = &copied
		}
	}
	return result, nil
}

// draw is a frontend whose new connections may get an endpoint.
type draw struct {
	endpoint netip.AddrPort
	text     string
	ready    bool // the EndpointSlices say so
}

// draws returns all that the engine has, without any index.
func (e *engineOf) draws(state *changetracker.State) (all []draw) {
	for name, s := range e.has {
		for i := range s.Frontends {
			f := &s.Frontends[i]
			var endpoints []netip.AddrPort
			if f.Action == desired.Forward {
				endpoints = s.Endpoints(f.Scope).Slice()
			}
			if f.ShortCircuit {
				endpoints = slices.Concat(endpoints, s.Cluster.Slice())
			}
			for _, addr := range endpoints {
				listed, ok := state.Endpoint(name, addr)
				all = append(all, draw{addr, fmt.Sprintf("%v %v at %v", addr, name, s.Key(f)), ok && listed.Ready})
			}
		}
	}
	return all
}

// Sends is what the engine has, through changes of everything and refusals: each answer about an address, asked for
// before or not, is what a look at all that the engine has gives. Without a question, it has the endpoints that are
// not ready.
func TestSendsIsWhatTheEngineHas(t *testing.T) {
	for _, indexed := range []bool{false, true} {
		t.Run(fmt.Sprintf("indexed=%v", indexed), func(t *testing.T) {
			config := withoutRetries()
			config.Tracker.IndexEndpoints, config.Node = indexed, changetracker.Node{Name: "here", Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.10")}}
			run(t, config, func(t *testing.T, f *fixture) {
				seed := rand.Uint64()
				t.Logf("seed %d", seed)
				dice := rand.New(rand.NewPCG(seed, 0))
				refused := map[string]bool{}
				e := &engineOf{map[changetracker.ServicePortName]*desired.Service{}, func(name changetracker.ServicePortName) bool { return refused[name.Name] }}
				f.v4.become(e.apply)
				f.synced()
				for step := range 400 {
					f.randomChange(dice, refused)
					if err := f.Sync(t.Context()); err != nil {
						t.Fatal(err)
					}
					var asked []netip.AddrPort
					for range 3 {
						asked = append(asked, netip.AddrPortFrom(endpointAddr(dice), uint16(8080*dice.IntN(2))))
					}
					var got, want []string
					for _, d := range e.draws(f.Programmed(v1.IPv4Protocol)) {
						if !d.ready || slices.ContainsFunc(asked, func(a netip.AddrPort) bool { return a.Addr() == d.endpoint.Addr() }) {
							want = append(want, d.text)
						}
					}
					for _, s := range f.Sends(asked...) {
						for _, key := range s.Frontends {
							got = append(got, fmt.Sprintf("%v %v at %v", s.Endpoint, s.Service, key))
						}
					}
					if got, want = sortedSet(got), sortedSet(want); !slices.Equal(got, want) {
						t.Fatalf("step %d, asked %v, refused %v:\n got %q\nwant %q", step, asked, refused, got, want)
					}
				}
			})
		})
	}
}

// TestLookupsAreForgotten: nobody has asked for a minute, so that no old State stays in memory.
func TestLookupsAreForgotten(t *testing.T) {
	run(t, withoutRetries(), func(t *testing.T, f *fixture) {
		f.synced()
		for i, want := range []int{1, 1, 0, 0} {
			f.OnServiceAdd(service("a", fmt.Sprintf("10.96.0.%d", 1+i)))
			if err := f.Sync(t.Context()); err != nil {
				t.Fatal(err)
			}
			if i == 0 {
				f.Sends(netip.MustParseAddrPort("10.244.0.1:80"))
			}
			if got := f.Lookups(v1.IPv4Protocol); got != want {
				t.Errorf("after %d minutes %d addresses are remembered, want %d", i/2, got, want)
			}
			pass(40 * time.Second)
		}
	})
}

func sortedSet(texts []string) []string {
	slices.Sort(texts)
	return slices.Compact(texts)
}

func endpointAddr(dice *rand.Rand) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 244, 0, byte(1 + dice.IntN(12))})
}

// randomChange changes a Service, its EndpointSlice, or what the engine refuses. Services share endpoints, and
// claim the same external IP.
func (f *fixture) randomChange(dice *rand.Rand, refused map[string]bool) {
	name := string(rune('a' + dice.IntN(6)))
	switch dice.IntN(10) {
	case 0:
		refused[name] = !refused[name]
	case 1:
		f.OnServiceDelete(service(name, "10.96.0.1"))
	case 2, 3, 4:
		var options []proxiertest.ServiceOption
		for _, option := range []proxiertest.ServiceOption{
			proxiertest.ExternalIPs("203.0.113.1"), proxiertest.InternalPolicyLocal(), proxiertest.LoadBalancer("203.0.113." + string('2'+rune(name[0])-'a')), proxiertest.ExternalPolicyLocal(),
		} {
			if dice.IntN(2) == 0 {
				options = append(options, option)
			}
		}
		f.OnServiceAdd(service(name, "10.96.0."+string('1'+rune(name[0])-'a'), options...))
	default:
		options := []proxiertest.SliceOption{proxiertest.SlicePort("web", v1.ProtocolTCP, 8080)}
		for range dice.IntN(4) {
			condition := []proxiertest.EndpointOption{proxiertest.OnNode([]string{"here", "there"}[dice.IntN(2)])}
			if dice.IntN(2) == 0 {
				condition = append(condition, []proxiertest.EndpointOption{proxiertest.Terminating(), proxiertest.Terminating(), proxiertest.NotServing()}[dice.IntN(3)])
			}
			options = append(options, proxiertest.Endpoint(endpointAddr(dice).String(), condition...))
		}
		f.OnEndpointSliceAdd(proxiertest.Slice("test", name, discovery.AddressTypeIPv4, options...))
	}
}

// A ready endpoint that stands by is programmed as one, also if connections to its group end: a pod that begins need not wait.
func TestSendsOfAnEndpointThatStandsBy(t *testing.T) {
	for _, end := range []bool{false, true} {
		config := withoutRetries()
		config.Tracker.DecorateService = func(p *changetracker.ServicePort, _ *v1.Service) { p.Failover.End = end }
		config.Tracker.DecorateEndpoint = func(e *changetracker.Endpoint, _ *discovery.Endpoint, _ *discovery.EndpointSlice) {
			e.Priority = e.Addr.Addr().As4()[3]
		}
		run(t, config, func(t *testing.T, f *fixture) {
			f.OnServiceAdd(service("a", "10.96.0.1"))
			f.OnEndpointSliceAdd(proxiertest.Slice("test", "a", discovery.AddressTypeIPv4, proxiertest.SlicePort("web", v1.ProtocolTCP, 8080),
				proxiertest.Endpoint("10.0.0.0"), proxiertest.Endpoint("10.0.0.1"), proxiertest.Endpoint("10.0.0.2", proxiertest.Terminating())))
			f.synced()
			if err := f.Sync(t.Context()); err != nil {
				t.Fatal(err)
			}
			for n, want := range []int{1, 1, 0} {
				got := f.Sends(netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}), 0))
				if len(got) != want || want > 0 && (!got[0].Ready || (len(got[0].Frontends) > 0) != (n == 0)) {
					t.Errorf("end %v: Sends of endpoint %d = %+v, want %d, ready, with frontends if it is the first", end, n, got, want)
				}
			}
		})
	}
}
