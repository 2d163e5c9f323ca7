package changetracker

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/internal/proportion"
)

// servicePorts makes a Service with n ports; edit sees each of them.
func servicePorts(n int, edit func(i int, p *v1.ServicePort)) *v1.Service {
	return webService(func(s *v1.Service) {
		s.Spec.Ports = make([]v1.ServicePort, n)
		for i := range s.Spec.Ports {
			s.Spec.Ports[i] = v1.ServicePort{Name: fmt.Sprintf("p%05d", n-i), Protocol: v1.ProtocolTCP, Port: int32(i%60_000 + 1)}
			if edit != nil {
				edit(i, &s.Spec.Ports[i])
			}
		}
	})
}

// slicePorts makes a slice with every step-th of the ports of such a Service.
func slicePorts(name string, n, first, step int, endpoints ...discovery.Endpoint) *discovery.EndpointSlice {
	s := webSlice(name, endpoints...)
	s.Ports = nil
	for i := first; i < n; i += step {
		s.Ports = append(s.Ports, endpointPort(fmt.Sprintf("p%05d", n-i), v1.ProtocolTCP, 8080))
	}
	return s
}

func manyEndpoints(n int) []discovery.Endpoint {
	list := make([]discovery.Endpoint, n)
	for i := range list {
		list[i] = at(fmt.Sprintf("10.%d.%d.%d", 1+i>>16, i>>8&255, i&255))
	}
	return list
}

func TestTimeIsInProportionToTheObject(t *testing.T) {
	all := func(Delta) ([]ServicePortName, error) { return nil, nil }
	none := func(delta Delta) (failed []ServicePortName, _ error) { //nolint:unparam // it is for Apply
		for _, c := range delta.Changes {
			failed = append(failed, c.Name)
		}
		return failed, nil
	}
	for name, prepare := range map[string]func(tr *Tracker, n int) func(){
		"a Service and its slice": func(tr *Tracker, n int) func() {
			service, slice := servicePorts(n, nil), slicePorts("a", n, 0, 1, at("10.0.0.1"))
			return func() {
				tr.Services.Update(nil, service)
				tr.Endpoints.EndpointSliceUpdate(slice, false)
				_ = tr.Apply(v1.IPv4Protocol, all)
			}
		},
		"a Service that changes in every port": func(tr *Tracker, n int) func() {
			tr.Services.Update(nil, servicePorts(n, nil))
			_ = tr.Apply(v1.IPv4Protocol, all)
			service := servicePorts(n, func(_ int, p *v1.ServicePort) { p.NodePort = 30_000 })
			return func() {
				tr.Services.Update(nil, service)
				_ = tr.Apply(v1.IPv4Protocol, all)
			}
		},
		"many Services with one VIP": func(tr *Tracker, n int) func() {
			_ = tr.Apply(v1.IPv4Protocol, all)
			services := make([]*v1.Service, n)
			for i := range services {
				services[i] = webService(func(s *v1.Service) { s.Name, s.Spec.ExternalIPs = fmt.Sprint(i), []string{"203.0.113.1"} })
			}
			return func() {
				for _, s := range services {
					tr.Services.Update(nil, s)
				}
			}
		},
		"a Service whose ports are wrong": func(tr *Tracker, n int) func() {
			tr.Services.Update(nil, servicePorts(n, func(_ int, p *v1.ServicePort) { p.Port = 0 }))
			service := servicePorts(n, func(_ int, p *v1.ServicePort) { p.Port = -1 })
			return func() { tr.Services.Update(nil, service) }
		},
		"a Service whose ports have one name": func(tr *Tracker, n int) func() {
			service := servicePorts(n, func(_ int, p *v1.ServicePort) { p.Name = "" })
			return func() { tr.Services.Update(nil, service) }
		},
		"slices with ports by turns": func(tr *Tracker, n int) func() {
			tr.Services.Update(nil, servicePorts(n, nil))
			_ = tr.Apply(v1.IPv4Protocol, all)
			even, odd := slicePorts("a", n, 0, 2, at("10.0.0.1")), slicePorts("b", n, 1, 2, at("10.0.0.1"))
			return func() {
				tr.Endpoints.EndpointSliceUpdate(even, false)
				tr.Endpoints.EndpointSliceUpdate(odd, false)
				_ = tr.Apply(v1.IPv4Protocol, all)
			}
		},
		"every port fails": func(tr *Tracker, n int) func() {
			tr.Services.Update(nil, servicePorts(n, nil))
			return func() { _ = tr.Apply(v1.IPv4Protocol, none) }
		},
		"a slice of many endpoints moves to another node": func(tr *Tracker, n int) func() {
			tr.Services.Update(nil, servicePorts(2, nil))
			tr.Endpoints.EndpointSliceUpdate(slicePorts("a", 2, 0, 1, manyEndpoints(n)...), false)
			return func() {
				tr.SetNode(Node{Name: "there"})
				_ = tr.Apply(v1.IPv4Protocol, all)
			}
		},
		"hand-built": func(tr *Tracker, n int) func() {
			ports := make([]ServicePort, n)
			for i := range ports {
				ports[i] = ServicePort{Name: portName(fmt.Sprintf("p%05d", n-i), v1.ProtocolTCP), Port: 80, ClusterIP: netip.MustParseAddr("10.96.0.1")}
			}
			return func() {
				_, _ = tr.Services.Set(web, ports...)
				for i := range ports {
					_, _ = tr.Endpoints.Set(ports[i].Name, Endpoint{Addr: addrPort("10.0.0.1:80"), Ready: true})
				}
				_ = tr.Apply(v1.IPv4Protocol, all)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			proportion.Check(t, 3_000, func(n int) func() { return prepare(mustTracker(t), n) })
		})
	}
}

func TestMemoryIsInProportionToTheSlice(t *testing.T) {
	const ports, endpoints = 2_000, 500
	for name, c := range map[string]struct {
		service *v1.Service
		used    int
	}{
		"no Service":                      {nil, 0},
		"a Service without such a port":   {webService(), 0},
		"a Service with one of the ports": {servicePorts(1, func(_ int, p *v1.ServicePort) { p.Name = "p00007" }), 1},
	} {
		t.Run(name, func(t *testing.T) {
			tracker := mustTracker(t)
			if c.service != nil {
				tracker.Services.Update(nil, c.service)
			}
			slice := slicePorts("a", ports, 0, 1, manyEndpoints(endpoints)...)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			tracker.Endpoints.EndpointSliceUpdate(slice, false)
			tracker.SetNode(Node{Name: "elsewhere"})
			state, _ := applyAll(t, tracker, v1.IPv4Protocol)
			tracker.Endpoints.EndpointSliceUpdate(slicePorts("a", ports, 0, 1, manyEndpoints(endpoints+1)...), false)
			runtime.ReadMemStats(&after)
			// An endpoint is some 150 bytes, and a port 40. One for each pair would be
			// 150 MB.
			if got := after.TotalAlloc - before.TotalAlloc; got > 4<<20 {
				t.Errorf("%d bytes allocated for %d ports and %d endpoints, want some hundred kB", got, ports, endpoints)
			}
			if got := len(state.Endpoints(portName("p00007", v1.ProtocolTCP))); got != c.used*endpoints {
				t.Errorf("endpoints of p00007 = %d, want %d", got, c.used*endpoints)
			}
		})
	}
}
