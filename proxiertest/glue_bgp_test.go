package proxiertest_test

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// speaker announces external VIPs to a router, each as long as a port of it is served.
type speaker struct {
	mu     sync.Mutex // guards the fields below; both families call at once
	served map[netip.Addr]map[desired.Key]bool
	down   error // of the session
}

func (s *speaker) Announce(_ context.Context, _ v1.IPFamily, announcements []proxier.Announcement) error {
	return s.tell(announcements, func(a proxier.Announcement) {
		if s.served[a.Key.VIP] == nil {
			s.served[a.Key.VIP] = map[desired.Key]bool{}
		}
		s.served[a.Key.VIP][a.Key] = true
	})
}

func (s *speaker) Withdraw(_ context.Context, _ v1.IPFamily, announcements []proxier.Announcement) error {
	return s.tell(announcements, func(a proxier.Announcement) {
		if delete(s.served[a.Key.VIP], a.Key); len(s.served[a.Key.VIP]) == 0 {
			delete(s.served, a.Key.VIP)
		}
	})
}

func (s *speaker) tell(announcements []proxier.Announcement, do func(proxier.Announcement)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range announcements {
		if s.down == nil && a.Kind != desired.ClusterIP {
			do(a)
		}
	}
	return s.down
}

func (s *speaker) routes() []netip.Addr {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.SortedFunc(maps.Keys(s.served), netip.Addr.Compare)
}

// TestGlueOfABGPSpeaker: a VIP is announced while this node serves it.
func TestGlueOfABGPSpeaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &speaker{served: map[netip.Addr]map[desired.Key]bool{}}
		engine := &proxiertest.RecordingEngine{}
		p, err := proxier.New(proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}, Node: changetracker.Node{Name: "here"}},
			proxier.Deps{Announcer: s}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: engine})
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- p.Run(ctx) }()
		want := func(when string, routes ...string) {
			t.Helper()
			err := p.Sync(t.Context())
			var got []string
			for _, a := range s.routes() {
				got = append(got, a.String())
			}
			if !slices.Equal(got, routes) {
				t.Errorf("%s: %v is announced after %v, want %v", when, got, err, routes)
			}
		}
		endpoint := func(options ...proxiertest.EndpointOption) {
			p.OnEndpointSliceAdd(proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4,
				proxiertest.SlicePort("http", v1.ProtocolTCP, 8080), proxiertest.SlicePort("https", v1.ProtocolTCP, 8443),
				proxiertest.Endpoint("10.1.0.1", options...)))
		}
		service := func(ports ...proxiertest.ServiceOption) *v1.Service {
			return proxiertest.Service("shop", "web", append(ports, proxiertest.ClusterIPs("10.96.0.10"),
				proxiertest.ExternalIPs("198.51.100.7"), proxiertest.ExternalPolicyLocal())...)
		}
		http, https := proxiertest.NodePort("http", v1.ProtocolTCP, 80, 30080), proxiertest.NodePort("https", v1.ProtocolTCP, 443, 30443)
		p.OnServiceAdd(service(http, https))
		p.OnServiceSynced()
		p.OnEndpointSlicesSynced()
		want("no endpoints")
		endpoint(proxiertest.OnNode("there"))
		want("an endpoint elsewhere")
		endpoint(proxiertest.OnNode("here"))
		want("an endpoint here", "198.51.100.7")
		p.OnServiceUpdate(nil, service(https))
		want("one port is left", "198.51.100.7")
		endpoint(proxiertest.OnNode("here"), proxiertest.Terminating())
		want("it terminates: others shall come to other nodes")
		engine.Fail(errors.New("the kernel said no"))
		endpoint(proxiertest.OnNode("here"))
		want("it is back, and cannot be programmed")
		engine.Fail(nil)
		want("it can", "198.51.100.7")
		s.down = errors.New("no session")
		p.OnServiceDelete(service(https))
		want("the session is down, so that nobody hears", "198.51.100.7")
		s.down = nil
		want("the session is back")
		p.OnServiceAdd(service(http))
		want("another port", "198.51.100.7")
		stop()
		if err := errors.Join(<-ended, p.Cleanup(t.Context())); err != nil || len(s.routes()) != 0 {
			t.Errorf("Run and Cleanup = %v, %v is announced, want nothing", err, s.routes())
		}
	})
}
