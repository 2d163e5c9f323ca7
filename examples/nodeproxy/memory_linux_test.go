package main

import (
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// manyServices puts Services with a ClusterIP into an API server, and an EndpointSlice of each, with
// what the control plane writes into them.
func manyServices(t *testing.T, api *apitest.Server, services, endpoints int) {
	t.Helper()
	managed := []metav1.ManagedFieldsEntry{{
		Manager: "kube-controller-manager", Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "v1", FieldsType: "FieldsV1",
		FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:labels":{".":{},"f:app":{},"f:team":{}}},"f:spec":{"f:internalTrafficPolicy":{},"f:ports":{},"f:selector":{},"f:sessionAffinity":{},"f:type":{}}}`),
	}}
	for i := range services {
		name := fmt.Sprintf("service-%d", i)
		meta := metav1.ObjectMeta{
			Namespace: "default", Name: name, UID: types.UID(fmt.Sprintf("11111111-2222-3333-4444-%012d", i)),
			Labels: map[string]string{"app": name, "team": "a"}, ManagedFields: managed,
		}
		ip := netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}).String()
		api.Put(t, &v1.Service{ObjectMeta: meta, Spec: v1.ServiceSpec{
			ClusterIP: ip, ClusterIPs: []string{ip}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol}, Type: v1.ServiceTypeClusterIP,
			Ports: []v1.ServicePort{{Name: "http", Protocol: v1.ProtocolTCP, Port: 80}}, Selector: map[string]string{"app": name},
		}})
		meta.Name += "-abcde"
		meta.Labels = map[string]string{"app": name, "team": "a", discovery.LabelServiceName: name, discovery.LabelManagedBy: "endpointslice-controller.k8s.io"}
		slice := &discovery.EndpointSlice{
			ObjectMeta: meta, AddressType: discovery.AddressTypeIPv4,
			Ports: []discovery.EndpointPort{{Name: new("http"), Protocol: new(v1.ProtocolTCP), Port: new(int32(8080))}},
		}
		for e := range endpoints {
			n := i*endpoints + e
			slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{
				Addresses:  []string{netip.AddrFrom4([4]byte{10, byte(128 + n>>16), byte(n >> 8), byte(n)}).String()},
				Conditions: discovery.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
				NodeName:   new(fmt.Sprintf("node-%d", n%1000)), Zone: new(fmt.Sprintf("zone-%d", n%3)),
				TargetRef: &v1.ObjectReference{
					Kind: "Pod", Namespace: "default", Name: fmt.Sprintf("%s-6d4cf56db6-%05d", name, e),
					UID: types.UID(fmt.Sprintf("11111111-2222-3333-4444-%012d", n)),
				},
			})
		}
		api.Put(t, slice)
	}
}

// memory returns the resident memory of the process in MiB, and the most that it ever had.
func (p *proxyProcess) memory() (now, peak int) {
	p.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		p.t.Fatal(err)
	}
	number := func(name string) int {
		found := regexp.MustCompile(name + `:\s+(\d+) kB`).FindSubmatch(status)
		if found == nil {
			p.t.Fatalf("no %s in\n%s", name, status)
		}
		n, _ := strconv.Atoi(string(found[1]))
		return n >> 10
	}
	return number("VmRSS"), number("VmHWM")
}

// TestMemory bounds the resident memory that the program has after its first sync, and the most that
// it ever has, in MiB, for a list that
// arrives as a stream, and for one that arrives whole. Some is free for a collector that runs
// late.
func TestMemory(t *testing.T) {
	services, rest, limits := 1000, 60, map[bool]int{true: 70, false: 80}
	if os.Getenv("SERVICEPLANE_BENCH_FULL") != "" {
		services, rest, limits = 10_000, 90, map[bool]int{true: 140, false: 240}
	}
	for streamed, limit := range limits {
		t.Run(fmt.Sprintf("streamed=%t", streamed), func(t *testing.T) {
			ns := netnstest.New(t)
			listener, err := ns.Listen(t.Context(), "tcp", "127.0.0.1:6443")
			netnstest.Check(t, err)
			api := apitest.New(t, apitest.Options{WatchList: streamed, Listener: listener})
			manyServices(t, api, services, 10)
			api.Put(t, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}})
			p := start(t, ns, "--kubeconfig="+api.Kubeconfig(t), "--proxy-mode=nftables", "--state-dir="+t.TempDir())
			p.waitHealthy()
			poll.Nil(t, "memory is given back", func() error {
				if now, _ := p.memory(); now > rest {
					return fmt.Errorf("%d MiB, want at most %d", now, rest)
				}
				return nil
			})
			now, peak := p.memory()
			t.Logf("%d Services × 10 endpoints: %d MiB, before at most %d MiB", services, now, peak)
			if peak > limit {
				t.Errorf("%d MiB at most, want %d", peak, limit)
			}
		})
	}
}
