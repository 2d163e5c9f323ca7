package proxier_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// speaker is a data plane and its announcements, which are compared after each step.
type speaker struct {
	*rand.Rand

	mu        sync.Mutex // guards all below
	has       map[changetracker.ServicePortName]map[desired.Key]bool
	announced map[desired.Key]bool
	withdrawn int
	lapsed    map[netip.Addr]bool // VIPs of which this sync has withdrawn the last announcement
	breaks    breaks
	faultless bool // nothing has ever failed
	faults    []string
	// isLocal holds the Services with policy Local, isReady the service ports with a ready
	// endpoint on this node.
	isLocal map[string]bool
	isReady map[changetracker.ServicePortName]bool
}

// breaks selects what fails at random.
type breaks struct{ engine, session bool }

func newSpeaker(seed uint64, breaks breaks) *speaker {
	return &speaker{
		Rand: rand.New(rand.NewPCG(seed, 7)), breaks: breaks, faultless: !breaks.engine && !breaks.session,
		has: map[changetracker.ServicePortName]map[desired.Key]bool{}, announced: map[desired.Key]bool{}, lapsed: map[netip.Addr]bool{},
		isLocal: map[string]bool{}, isReady: map[changetracker.ServicePortName]bool{},
	}
}

func (s *speaker) fault(format string, args ...any) {
	s.faults = append(s.faults, fmt.Sprintf(format, args...))
}

// serves reports whether the data plane has a frontend.
func (s *speaker) serves(key desired.Key) bool {
	for _, keys := range s.has {
		if keys[key] {
			return true
		}
	}
	return false
}

// check looks for announcements that are not served, except those of VIPs that pass to another frontend.
func (s *speaker) check(when string, passing map[netip.Addr]bool) {
	for announced := range s.announced {
		if !s.serves(announced) && !passing[announced.VIP] {
			s.fault("%s: %v is announced but not served", when, announced)
		}
	}
}

func (s *speaker) announces(vip netip.Addr) bool {
	for key := range s.announced {
		if key.VIP == vip {
			return true
		}
	}
	return false
}

func (s *speaker) Withdraw(_ context.Context, family v1.IPFamily, list []proxier.Announcement) error {
	return s.receive(family, list, func(key desired.Key) {
		delete(s.announced, key)
		s.withdrawn++
		s.lapsed[key.VIP] = !s.announces(key.VIP)
	})
}

func (s *speaker) Announce(_ context.Context, family v1.IPFamily, list []proxier.Announcement) error {
	return s.receive(family, list, func(key desired.Key) {
		if !s.breaks.engine && s.lapsed[key.VIP] {
			s.fault("%v was withdrawn, and is announced in the same sync", key)
		}
		s.announced[key] = true
	})
}

// ObserveSync implements proxier.Observer.
func (s *speaker) ObserveSync(report proxier.SyncReport) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if report.Family == v1.IPv4Protocol {
		clear(s.lapsed)
	}
}

func (s *speaker) receive(family v1.IPFamily, list []proxier.Announcement, do func(desired.Key)) error {
	if family != v1.IPv4Protocol {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.breaks.session && s.IntN(4) == 0 { // in the middle
		for _, a := range list[:s.IntN(len(list)+1)] {
			do(a.Key)
		}
		return errors.New("the session is down")
	}
	for _, a := range list {
		do(a.Key)
	}
	return nil
}

// apply is Apply of the engine: some service ports fail, or the whole Update.
func (s *speaker) apply(u desired.Update) (result proxier.Result, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.breaks.engine && s.IntN(6) == 0 {
		return result, errors.New("socket died")
	}
	next := map[changetracker.ServicePortName]map[desired.Key]bool{}
	if !u.Full {
		next = maps.Clone(s.has)
	}
	for name := range u.Removed() {
		delete(next, name)
	}
	passing := map[netip.Addr]bool{}
	for service := range u.Services() {
		if s.breaks.engine && s.IntN(4) == 0 {
			e := &proxier.ServiceError{Name: service.Name, Err: errors.New("refused"), Partial: s.IntN(2) == 0}
			result.Failed = append(result.Failed, e)
			if next[service.Name] = s.has[service.Name]; e.Partial {
				delete(next, service.Name)
			}
			continue
		}
		keys := map[desired.Key]bool{}
		for i := range service.Frontends {
			if service.Frontends[i].Action == desired.Forward {
				keys[service.Key(&service.Frontends[i])] = true
			}
		}
		for key := range keys {
			passing[key.VIP] = passing[key.VIP] || !s.announced[key]
		}
		next[service.Name] = keys
	}
	s.has = next
	if s.faultless { // failed service ports are withdrawn after Apply
		s.check("Apply", passing)
	}
	return result, nil
}

// A VIP is announced while it is served and at no other time: random Services are added, changed and deleted,
// engine and announcer fail at random, and finally nothing fails.
func TestAVIPIsAnnouncedWhileItIsServed(t *testing.T) {
	for seed := range uint64(150) {
		for _, breaks := range []breaks{{}, {engine: true}, {session: true}, {engine: true, session: true}} {
			s := newSpeaker(seed, breaks)
			config := withoutRetries()
			config.Node.Name = "here"
			runWith(t, config, proxier.Deps{Announcer: s, Observer: s}, func(t *testing.T, f *fixture) {
				f.v4.become(s.apply)
				f.synced()
				synctest.Wait()
				for range 12 {
					s.mu.Lock()
					for range 1 + s.IntN(3) {
						s.change(f)
					}
					s.mu.Unlock()
					_ = f.Sync(t.Context())
					if !breaks.session {
						s.check("a sync", nil)
					}
				}
				s.mu.Lock()
				s.breaks = struct{ engine, session bool }{}
				s.mu.Unlock()
				if err := f.Sync(t.Context()); err != nil {
					t.Fatalf("seed %d: Sync = %v, want nil when nothing fails", seed, err)
				}
				want := s.wanted()
				if got := slices.SortedFunc(maps.Keys(s.announced), desired.Key.Compare); !slices.Equal(got, want) {
					t.Errorf("seed %d: announced %v in the end, want %v", seed, got, want)
				}
				if len(s.faults) > 0 {
					t.Errorf("seed %d: %v", seed, s.faults)
				}
			})
			if t.Failed() {
				return
			}
		}
	}
}

// change adds, changes or deletes a Service, or replaces the endpoints of one of its two
// ports. Services may share VIPs.
func (s *speaker) change(f *fixture) {
	n := s.IntN(4)
	name := string(rune('a' + n))
	switch s.IntN(3) {
	case 0:
		f.Tracker().Services.Delete(types.NamespacedName{Namespace: "test", Name: name})
	case 1:
		s.isLocal[name] = s.IntN(2) == 0
		f.Tracker().Services.Update(nil, service(name, fmt.Sprintf("10.0.0.%d", n+1), func(o *v1.Service) {
			o.Spec.Type, o.Spec.Ports[0].NodePort = v1.ServiceTypeNodePort, int32(30000+n)
			o.Spec.Ports = append(o.Spec.Ports, v1.ServicePort{Name: "admin", Protocol: v1.ProtocolTCP, Port: 81})
			o.Spec.ExternalIPs = []string{fmt.Sprintf("198.51.100.%d", 1+s.IntN(3))}
			if o.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyCluster; s.isLocal[name] {
				o.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
			}
		}))
	default:
		f.Tracker().Endpoints.EndpointSliceUpdate(s.endpoints(n, name, []string{"web", "admin"}[s.IntN(2)]), false)
	}
}

// endpoints returns a random subset of three endpoints of one port: a ready one on this
// node, a ready one on another node, and a terminating one on this node.
func (s *speaker) endpoints(n int, name, port string) *discovery.EndpointSlice {
	list := slice(name)
	list.Name += "-" + port
	list.Ports[0].Name = &port
	id := changetracker.ServicePortName{
		NamespacedName: types.NamespacedName{Namespace: "test", Name: name}, Port: port, Protocol: v1.ProtocolTCP,
	}
	s.isReady[id] = false
	for i, node := range []string{"here", "there", "here"} {
		if s.IntN(2) == 0 {
			continue
		}
		ready, serving := i < 2, true
		terminating := !ready
		list.Endpoints = append(list.Endpoints, discovery.Endpoint{
			Addresses: []string{fmt.Sprintf("10.1.%d.%d", n, i+1)}, NodeName: &node,
			Conditions: discovery.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating},
		})
		s.isReady[id] = s.isReady[id] || i == 0
	}
	return list
}

// wanted returns the VIPs that the data plane serves; those with policy Local only if a
// ready endpoint is on this node.
func (s *speaker) wanted() []desired.Key {
	var keys []desired.Key
	for name, of := range s.has {
		for key := range of {
			isExternal := netip.MustParsePrefix("198.51.100.0/24").Contains(key.VIP)
			if key.VIP.IsValid() && (!isExternal || !s.isLocal[name.Name] || s.isReady[name]) {
				keys = append(keys, key)
			}
		}
	}
	slices.SortFunc(keys, desired.Key.Compare)
	return keys
}

// A cleanup withdraws first, while the end of Run withdraws nothing.
func TestCleanupWithdrawsFirst(t *testing.T) {
	s := newSpeaker(1, breaks{})
	var p *proxier.Proxier
	runWith(t, withoutRetries(), proxier.Deps{Announcer: s}, func(t *testing.T, f *fixture) {
		p = f.Proxier
		f.v4.become(s.apply)
		f.OnServiceAdd(service("a", "10.0.0.1"))
		f.OnEndpointSliceAdd(slice("a", "10.1.0.1"))
		f.synced()
		synctest.Wait()
	})
	if len(s.announced) != 1 || s.withdrawn != 0 {
		t.Errorf("announced %v after Run, %d withdrawn, want one and none", s.announced, s.withdrawn)
	}
	if err := p.Cleanup(t.Context()); err != nil || len(s.announced) != 0 || s.withdrawn != 1 {
		t.Errorf("Cleanup = %v, announced %v, want nothing", err, s.announced)
	}
}
