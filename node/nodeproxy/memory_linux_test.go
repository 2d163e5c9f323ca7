package nodeproxy

import (
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

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
func manyServices(tb testing.TB, api *apitest.Server, services, endpoints int) {
	tb.Helper()
	for i := range services {
		meta := usualMeta(i)
		ip := netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}).String()
		api.Put(tb, &v1.Service{ObjectMeta: meta, Spec: v1.ServiceSpec{
			ClusterIP: ip, ClusterIPs: []string{ip}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol}, Type: v1.ServiceTypeClusterIP,
			Ports: []v1.ServicePort{{Name: "http", Protocol: v1.ProtocolTCP, Port: 80}}, Selector: meta.Labels,
		}})
		api.Put(tb, manyEndpoints(i, endpoints, 0))
	}
}

// usualMeta is what Services have that people make.
func usualMeta(i int) metav1.ObjectMeta {
	name := fmt.Sprintf("service-%d", i)
	return metav1.ObjectMeta{
		Namespace: "default", Name: name, UID: types.UID(fmt.Sprintf("11111111-2222-3333-4444-%012d", i)),
		Labels: map[string]string{"app": name, "team": "a"},
		ManagedFields: []metav1.ManagedFieldsEntry{{
			Manager: "kube-controller-manager", Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "v1", FieldsType: "FieldsV1",
			FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:labels":{".":{},"f:app":{},"f:team":{}}},"f:spec":{"f:internalTrafficPolicy":{},"f:ports":{},"f:selector":{},"f:sessionAffinity":{},"f:type":{}}}`),
		}},
	}
}

// manyEndpoints is the EndpointSlice of one of manyServices. One endpoint differs with the turn.
func manyEndpoints(i, endpoints, turn int) *discovery.EndpointSlice {
	meta := usualMeta(i)
	name := meta.Name
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
	slice.Endpoints[0].Conditions.Ready = new(turn%2 == 0)
	return slice
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

// startAmong starts the program beside an API server that has many Services, and waits until it has
// synced and given memory back, so that at most so many MiB are left.
func startAmong(tb testing.TB, services, rest int, streamed bool) (*proxyProcess, *apitest.Server) {
	tb.Helper()
	ns := netnstest.New(tb)
	listener, err := ns.Listen(tb.Context(), "tcp", "127.0.0.1:6443")
	netnstest.Check(tb, err)
	api := apitest.New(tb, apitest.Options{WatchList: streamed, Protobuf: true, Listener: listener})
	manyServices(tb, api, services, 10)
	api.Put(tb, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}})
	p := prepare(tb, ns, "--kubeconfig="+api.Kubeconfig(tb), "--proxy-mode=nftables", "--state-dir="+tb.TempDir())
	p.cmd.Env = append(p.cmd.Env, "GODEBUG=gctrace=1") // a line for each collection
	p.run()
	p.waitHealthy()
	poll.Nil(tb, "memory is given back", func() error {
		if now, _ := p.memory(); now > rest {
			return fmt.Errorf("%d MiB, want at most %d", now, rest)
		}
		return nil
	})
	return p, api
}

// TestMemory bounds the resident memory that the program has after its first sync, and the most that
// it ever has, in MiB, for a list that arrives as a stream, and for one that arrives whole. Some is free
// for a collector that runs late.
func TestMemory(t *testing.T) {
	for streamed, limit := range map[bool]int{true: 70, false: 80} {
		t.Run(fmt.Sprintf("streamed=%t", streamed), func(t *testing.T) {
			p, _ := startAmong(t, 1000, 60, streamed)
			if _, peak := p.memory(); peak > limit {
				t.Errorf("%d MiB at most, want %d", peak, limit)
			}
		})
	}
}

// BenchmarkMemory measures the resident memory of the program with many Services, in MiB: after the
// first sync, and the most of it; then 1,000 changes a second, with the CPU time of the program and
// of its collections of garbage.
func BenchmarkMemory(b *testing.B) {
	services, rest, seconds := 1000, 60, 1
	if os.Getenv("SERVICEPLANE_BENCH_FULL") == "1" {
		services, rest, seconds = 10_000, 90, 30
	}
	for _, streamed := range []bool{true, false} {
		b.Run(fmt.Sprintf("N=%d/E=10/streamed=%t", services, streamed), func(b *testing.B) {
			p, api := startAmong(b, services, rest, streamed)
			now, peak := p.memory()
			b.ReportMetric(float64(now), "rest-MiB")
			b.ReportMetric(float64(peak), "peak-MiB")
			b.ReportMetric(0, "ns/op")
			if !streamed {
				return
			}
			collected, used, began := p.collected(), p.cpuTime(), time.Now()
			tick := time.NewTicker(10 * time.Millisecond)
			defer tick.Stop()
			for i := range 1000 * seconds {
				if i%10 == 0 {
					<-tick.C
				}
				api.Put(b, manyEndpoints(i%services, 10, 1+i/services))
			}
			wall := time.Since(began)
			p.waitNothingPending()
			_, peak = p.memory()
			b.ReportMetric(float64(peak), "churn-MiB")
			b.ReportMetric(100*float64(p.collected()-collected)/float64(wall), "gc-%core")
			b.ReportMetric(100*float64(p.cpuTime()-used)/float64(wall), "%core")
		})
	}
}

// collected returns the CPU time of all collections of garbage, idle processors' too.
func (p *proxyProcess) collected() (sum time.Duration) {
	for _, line := range regexp.MustCompile(`([0-9.+/]+) ms cpu`).FindAllStringSubmatch(p.stderr(), -1) {
		for _, phase := range strings.FieldsFunc(line[1], func(r rune) bool { return r == '+' || r == '/' }) {
			ms, err := strconv.ParseFloat(phase, 64)
			if err != nil {
				p.t.Fatalf("collections: %v in %q", err, line[0])
			}
			sum += time.Duration(ms * float64(time.Millisecond))
		}
	}
	return sum
}
