package proxiertest_test

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// response holds all services of a registry, as xDS servers and Consul return them, with
// names and addresses, but without ClusterIPs.
type response struct {
	version  string
	services []registered
}

type registered struct {
	name     string
	vip      string // "address:port", or ":port" for a port of the node
	backends []string
}

// subscriber applies the responses of a registry one by one.
type subscriber struct {
	proxy  *proxier.Proxier
	active string   // the applied version
	nacks  []string // the errors that it returned for refused responses
}

func (s *subscriber) receive(r response) {
	ports, endpoints, err := contentOf(r)
	if err == nil {
		_, err = s.proxy.Tracker().Source("").Replace(ports, endpoints)
	}
	if err != nil {
		s.nacks = append(s.nacks, fmt.Sprintf("version %s: %v", r.version, err))
		return
	}
	s.active = r.version
	s.proxy.Trigger()
}

func contentOf(r response) (ports []changetracker.ServicePort, endpoints map[changetracker.ServicePortName][]changetracker.Endpoint, err error) {
	endpoints = map[changetracker.ServicePortName][]changetracker.Endpoint{}
	for _, svc := range r.services {
		name := changetracker.ServicePortName{
			NamespacedName: types.NamespacedName{Namespace: "registry", Name: svc.name}, Protocol: v1.ProtocolTCP,
		}
		port := changetracker.ServicePort{Name: name, Family: v1.IPv4Protocol}
		host, number, _ := strings.Cut(svc.vip, ":")
		if _, err := fmt.Sscan(number, &port.Port); err != nil {
			return nil, nil, fmt.Errorf("service %s: port %q: %w", svc.name, number, err)
		}
		if host == "" {
			port.NodePort = port.Port
		} else {
			vip, err := netip.ParseAddr(host)
			if err != nil {
				return nil, nil, fmt.Errorf("service %s: %w", svc.name, err)
			}
			port.LoadBalancerVIPs = []netip.Addr{vip}
		}
		ports = append(ports, port)
		for _, b := range svc.backends {
			addr, err := netip.ParseAddrPort(b)
			if err != nil {
				return nil, nil, fmt.Errorf("service %s: %w", svc.name, err)
			}
			endpoints[name] = append(endpoints[name], changetracker.Endpoint{Addr: addr, Ready: true})
		}
	}
	return ports, endpoints, nil
}

// dialled returns the engine's frontends with their endpoints.
func dialled(engine *proxiertest.RecordingEngine) string {
	var lines []string
	for _, s := range engine.Services() {
		for i := range s.Frontends {
			f := &s.Frontends[i]
			lines = append(lines, fmt.Sprintf("%v > %v", s.Key(f), s.Endpoints(f.Scope)))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, ", ")
}

// TestGlueOfARegistryWithoutKubernetes: each version replaces everything at once.
func TestGlueOfARegistryWithoutKubernetes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		engine := &proxiertest.RecordingEngine{}
		p, err := proxier.New(proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}}, proxier.Deps{},
			map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: engine})
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- p.Run(ctx) }()
		registry := &subscriber{proxy: p}
		db := registered{"db", "198.51.100.1:5432", []string{"10.0.0.1:5432", "10.0.0.2:5432"}}
		web := registered{"web", ":30080", []string{"10.0.0.3:8080"}}
		moved := []registered{{"db", "198.51.100.2:5432", db.backends[:1]}, {"web", "198.51.100.1:5432", web.backends}}
		before := "198.51.100.1:5432/TCP > [10.0.0.1:5432 10.0.0.2:5432], node port 30080/TCP > [10.0.0.3:8080]"
		after := "198.51.100.1:5432/TCP > [10.0.0.3:8080], 198.51.100.2:5432/TCP > [10.0.0.1:5432]"
		for i, c := range []struct {
			services []registered
			want     string
			updates  int // so far
			nack     string
		}{
			{[]registered{db, {"web", ":0", nil}}, "", 0, "registry/web: Port: invalid value 0"}, // before the first write
			{[]registered{db, web}, before, 1, ""},
			{moved, after, 2, ""}, // a VIP moves to another service
			{[]registered{db, {"bad", "198.51.100.3:80", []string{"0.0.0.0:80", "127.0.0.1:80"}}}, after, 2, "endpoint address: invalid value 0.0.0.0:80"},
			{moved, after, 2, ""},
			{[]registered{db, web}, before, 3, ""},
			{nil, "", 4, ""},
		} {
			registry.nacks = nil
			registry.receive(response{version: fmt.Sprint(i), services: c.services})
			synctest.Wait()
			if c.updates > 0 {
				if err := proxiertest.Sync(ctx, p); err != nil {
					t.Fatal(err)
				}
			}
			changing := slices.DeleteFunc(engine.Updates(), func(u desired.Update) bool { return !u.Full && len(u.Changes) == 0 })
			if got := dialled(engine); got != c.want || len(changing) != c.updates {
				t.Errorf("version %d: %q after %d updates, want %q after %d", i, got, len(changing), c.want, c.updates)
			}
			if refused := len(registry.nacks) > 0; refused != (c.nack != "") || refused && !strings.Contains(registry.nacks[0], c.nack) {
				t.Errorf("version %d: the registry received %q, want %q", i, registry.nacks, c.nack)
			}
		}
		if registry.active != "6" {
			t.Errorf("version %s is applied, want 6", registry.active)
		}
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
