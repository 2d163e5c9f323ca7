package healthcheck

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestARealProxier: the answers follow the endpoints and the health of the engine (HC-01,
// HC-08, HC-14, HC-23, HC-25).
func TestARealProxier(t *testing.T) {
	const threshold = 300 * time.Millisecond
	port := freePort(t)
	engines := map[v1.IPFamily]*proxiertest.RecordingEngine{v1.IPv4Protocol: {}, v1.IPv6Protocol: {}}
	p, err := proxier.New(
		proxier.Config{Node: changetracker.Node{Name: "node-1"}},
		proxier.Deps{Health: NewNodePortServer(NodePortOptions{Threshold: threshold})},
		map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: engines[v1.IPv4Protocol], v1.IPv6Protocol: engines[v1.IPv6Protocol]},
	)
	if err != nil {
		t.Fatal(err)
	}
	background(t, p.Run)
	proxy := NewHandler(p.Status, HandlerOptions{Threshold: threshold})
	v6 := hasIPv6(t)
	expect := func(rule string, portV4, portV6, healthz int) {
		t.Helper()
		got := [3]int{}
		poll.Until(t, fmt.Sprintf("%s: want %d, %d, %d", rule, portV4, portV6, healthz), func() bool {
			got[0], _ = ask(t, client(t), fmt.Sprintf("http://127.0.0.1:%d", port))
			if got[1] = portV6; v6 {
				got[1], _ = ask(t, client(t), fmt.Sprintf("http://[::1]:%d", port))
			}
			w := httptest.NewRecorder()
			proxy.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, HealthzPath, nil))
			got[2] = w.Code
			return got == [3]int{portV4, portV6, healthz}
		})
	}
	expect("nothing is programmed (W-21, HC-15)", 0, 0, 503)

	service := proxiertest.Service("shop", "web",
		proxiertest.ClusterIPs("10.96.0.10", "fd00:96::10"), proxiertest.NodePort("http", v1.ProtocolTCP, 80, 30080),
		proxiertest.LoadBalancer("192.0.2.80"), proxiertest.ExternalPolicyLocal())
	service.Spec.HealthCheckNodePort = int32(port)
	on := func(node string) *discovery.EndpointSlice {
		return proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4, proxiertest.SlicePort("http", v1.ProtocolTCP, 8080),
			proxiertest.Endpoint("10.244.1.2", proxiertest.OnNode(node)))
	}
	here, there := on("node-1"), on("node-2")
	p.OnServiceAdd(service)
	p.OnEndpointSliceAdd(here)
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	expect("an IPv4 endpoint on this node", 200, 503, 200)
	p.OnEndpointSliceUpdate(here, there)
	expect("the endpoint on another node", 503, 503, 200)
	p.OnEndpointSliceUpdate(there, here)
	expect("the endpoint on this node again", 200, 503, 200)

	engines[v1.IPv6Protocol].Fail(errors.New("the kernel is full"))
	p.OnEndpointSliceAdd(proxiertest.Slice("shop", "web", discovery.AddressTypeIPv6, proxiertest.SlicePort("http", v1.ProtocolTCP, 8080),
		proxiertest.Endpoint("fd00:244::1", proxiertest.OnNode("node-1"))))
	expect("an engine that fails for too long", 503, 503, 503)
	engines[v1.IPv6Protocol].Fail(nil)
	expect("an engine that works again", 200, 200, 200)

	cluster := service.DeepCopy()
	cluster.Spec.ExternalTrafficPolicy, cluster.Spec.HealthCheckNodePort = v1.ServiceExternalTrafficPolicyCluster, 0
	p.OnServiceUpdate(service, cluster)
	expect("a Service without the port", 0, 0, 200)
}
