package growth

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"runtime"
	"runtime/debug"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	"go.yaml.in/yaml/v3"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/ebpf"
	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/internal/manifest"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/ipvs"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/node/debughttp"
	"github.com/serviceplane/serviceplane/node/metrics"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/userspace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// linear is how much more than twice the time twice the input may cost: sorting does, and caches
// that are too small.
const linear = 1.3

// atLeast is the time of the smallest input that is measured, so that what does not grow counts for little.
const atLeast = 4 * time.Millisecond

// work makes an input of a size, and returns what is measured. It may be called many times.
type work func(t *testing.T, size int) (measured func())

// largest is the largest n: whatever takes no time then may grow as it likes.
const largest = 1 << 10

// TestGrowth measures each work at n, 2n and 4n. A busy machine can only make a measurement longer,
// so the shortest of several counts, and there are more of them while the growth is not linear. A cache
// that becomes too small makes a step, and then the growth goes on as before: so 4n, 8n and 16n decide.
func TestGrowth(t *testing.T) {
	all := works()
	for _, name := range chance.Some(t, len(all)/4, slices.Sorted(maps.Keys(all))...) {
		w := all[name]
		t.Run(name, func(t *testing.T) {
			size := 32
			for size < largest && best(w(t, size)) < atLeast {
				size *= 4
			}
			if !w.growsLinearly(t, size) && !w.growsLinearly(t, 4*size) {
				t.Error("twice the input takes more than twice the time")
			}
		})
	}
}

// growsLinearly measures three sizes.
func (w work) growsLinearly(t *testing.T, size int) bool {
	t.Helper()
	var runs [3]func()
	var times [3]time.Duration
	for i := range runs {
		runs[i] = w(t, size<<i)
	}
	const rounds = 8
	for round := range rounds {
		for i, run := range runs {
			if took := spent(run); round == 0 || took < times[i] {
				times[i] = took
			}
		}
		if isLinear(times) {
			break
		}
	}
	t.Logf("inputs of size %d, %d and %d take %v, %v and %v", size, 2*size, 4*size, times[0], times[1], times[2])
	return isLinear(times)
}

// isLinear judges both steps together.
func isLinear(times [3]time.Duration) bool {
	return float64(times[2]) <= 4*linear*linear*float64(times[0])
}

func best(run func()) time.Duration { return min(spent(run), spent(run), spent(run)) }

// spent is the processor time, without the collection of garbage.
func spent(run func()) time.Duration {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	runtime.GC()
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	before := processorTime()
	run()
	return processorTime() - before
}

func processorTime() time.Duration {
	var used unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &used); err != nil {
		panic(err)
	}
	return time.Duration(used.Nano())
}

// cluster is an input of Services and slices.
type cluster struct {
	services []*v1.Service
	slices   []*discovery.EndpointSlice
}

// shapes are clusters that grow in different ways.
func shapes() map[string]func(size int) cluster {
	return map[string]func(size int) cluster{
		"services":  manyServices,
		"endpoints": manyEndpoints,
		"addresses": manyAddresses,
		"ports":     manyPorts,
	}
}

func name(i int) string { return fmt.Sprintf("service-%06d", i) }

func clusterIP(i int) string {
	return netip.AddrFrom4([4]byte{10, 96 + byte(i>>16), byte(i >> 8), byte(i)}).String()
}

func pod(i int) string {
	return netip.AddrFrom4([4]byte{10, 128 + byte(i>>16), byte(i >> 8), byte(i)}).String()
}

func manyServices(size int) (c cluster) {
	for i := range size {
		c.services = append(c.services, proxiertest.Service("load", name(i), proxiertest.ClusterIPs(clusterIP(i)), proxiertest.Port("http", v1.ProtocolTCP, 80)))
		c.slices = append(c.slices, slice(name(i), 3*i, 3))
	}
	return c
}

func slice(service string, first, endpoints int) *discovery.EndpointSlice {
	options := []proxiertest.SliceOption{proxiertest.SliceName(fmt.Sprint(service, "-", first)), proxiertest.SlicePort("http", v1.ProtocolTCP, 8080)}
	for i := range endpoints {
		options = append(options, proxiertest.Endpoint(pod(first+i)))
	}
	return proxiertest.Slice("load", service, discovery.AddressTypeIPv4, options...)
}

func manyEndpoints(size int) (c cluster) {
	c.services = []*v1.Service{proxiertest.Service("load", name(0), proxiertest.ClusterIPs(clusterIP(0)), proxiertest.Port("http", v1.ProtocolTCP, 80))}
	const each = 100
	for first := 0; first < size; first += each {
		c.slices = append(c.slices, slice(name(0), first, min(each, size-first)))
	}
	return c
}

func manyAddresses(size int) (c cluster) {
	addrs := make([]string, size)
	for i := range addrs {
		addrs[i] = netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}).String()
	}
	c = manyEndpoints(3)
	c.services[0].Spec.ExternalIPs = addrs
	return c
}

func manyPorts(size int) (c cluster) {
	c = manyEndpoints(3)
	port := c.services[0].Spec.Ports[0]
	c.services[0].Spec.Ports = nil
	to := c.slices[0].Ports[0]
	c.slices[0].Ports = nil
	for i := range size {
		port.Name, port.Port = fmt.Sprint("port-", i), int32(i+1)
		c.services[0].Spec.Ports = append(c.services[0].Spec.Ports, port)
		to.Name = new(port.Name)
		c.slices[0].Ports = append(c.slices[0].Ports, to)
	}
	return c
}

func works() map[string]work {
	all := map[string]work{
		"manifest/JSON":              parses("load.json", indented),
		"manifest/YAML":              parses("load.yaml", asYAML),
		"manifest/JSON in one line":  parses("load.json", json.Marshal),
		"events in parts":            inParts,
		"kernel/nftables dump":       inKernel(dump),
		"kernel/nftables verify":     inKernel(verify),
		"kernel/nftables full sync":  inKernel(fullSync),
		"kernel/nftables first sync": inKernel(firstSync),
	}
	for shape, build := range shapes() {
		all["events/"+shape] = events(build)
		for mode, create := range planners() {
			all["plan/"+mode+"/"+shape] = plans(create, build)
		}
		all["metrics/"+shape] = scrapes(build)
		if shape != "services" && shape != "endpoints" {
			continue
		}
		for _, path := range []string{
			"status", "services?limit=1000", "service?namespace=load&name=" + name(0), "namespaces", "syncs", "state", "programmed", "report",
			"explain?source=10.128.0.1&destination=10.96.0.0:80&protocol=TCP&origin=pod",
		} {
			all["answer/"+path+"/"+shape] = answers(path, build)
		}
	}
	return all
}

func parses(file string, marshal func(any) ([]byte, error)) work {
	return func(t *testing.T, size int) func() {
		text, err := marshal(oneList(manyServices(size)))
		netnstest.Check(t, err)
		return func() {
			if _, errs := manifest.Parse(file, text); len(errs) > 0 {
				t.Fatal(errs[0])
			}
		}
	}
}

// oneList is a manifest with all objects.
func oneList(c cluster) any {
	items := []any{}
	for _, s := range c.services {
		s.APIVersion, s.Kind = "v1", "Service"
		items = append(items, s)
	}
	for _, s := range c.slices {
		s.APIVersion, s.Kind = "discovery.k8s.io/v1", "EndpointSlice"
		items = append(items, s)
	}
	return map[string]any{"apiVersion": "v1", "kind": "List", "items": items}
}

func asYAML(v any) ([]byte, error) {
	text, err := json.Marshal(v) // YAML does not know the names of fields
	if err != nil {
		return nil, err
	}
	var plain any
	if err := json.Unmarshal(text, &plain); err != nil {
		return nil, err
	}
	return yaml.Marshal(plain)
}

func indented(v any) ([]byte, error) { return json.MarshalIndent(v, "", " ") }

// events go through the trackers to the first Update.
func events(build func(int) cluster) work {
	return func(t *testing.T, size int) func() {
		c := build(size)
		return func() { updateOf(t, c) }
	}
}

// inParts are Services that come after the first Apply, and are applied in parts of one size.
func inParts(t *testing.T, size int) func() {
	services := manyServices(size).services
	return func() {
		tracker, err := changetracker.New(changetracker.Options{Families: []v1.IPFamily{v1.IPv4Protocol}})
		netnstest.Check(t, err)
		more := true
		apply := func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
			more = delta.More
			return nil, nil
		}
		netnstest.Check(t, tracker.Apply(v1.IPv4Protocol, apply))
		for _, s := range services {
			tracker.Services.Update(nil, s)
		}
		for more = true; more; {
			netnstest.Check(t, tracker.ApplyPart(v1.IPv4Protocol, changetracker.Part{Size: 16}, apply))
		}
	}
}

func updateOf(t *testing.T, c cluster) (update desired.Update) {
	t.Helper()
	tracker, err := changetracker.New(changetracker.Options{Families: []v1.IPFamily{v1.IPv4Protocol}, Node: node()})
	netnstest.Check(t, err)
	for _, s := range c.services {
		tracker.Services.Update(nil, s)
	}
	for _, s := range c.slices {
		tracker.Endpoints.EndpointSliceUpdate(s, false)
	}
	updater := desired.NewUpdater()
	netnstest.Check(t, tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
		update = updater.Next(delta, desired.Resolver{Node: node()}, desired.Globals{NodeAddresses: node().Addresses}, true)
		updater.Done(nil)
		return nil, nil
	}))
	if len(update.Changes) == 0 {
		t.Fatal("the cluster has no service port")
	}
	return update
}

func node() changetracker.Node {
	return changetracker.Node{Name: "node-1", Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.10")}}
}

func planners() map[string]func(proxier.Config) (proxier.Engine, error) {
	const family = v1.IPv4Protocol
	return map[string]func(proxier.Config) (proxier.Engine, error){
		"nftables": func(c proxier.Config) (proxier.Engine, error) {
			return nftables.NewEngine(nftables.Config{Config: c}, family, proxier.Deps{})
		},
		"iptables": func(c proxier.Config) (proxier.Engine, error) {
			return iptables.NewEngine(iptables.Config{Config: c}, family, proxier.Deps{})
		},
		"ipvs": func(c proxier.Config) (proxier.Engine, error) {
			return ipvs.NewEngine(ipvs.Config{Config: c}, family, proxier.Deps{})
		},
		"ebpf": func(c proxier.Config) (proxier.Engine, error) {
			return ebpf.NewEngine(ebpf.Config{Config: nftables.Config{Config: c}, Sockets: ebpf.Sockets{Cgroups: []string{"/sys/fs/cgroup"}}}, family, proxier.Deps{})
		},
		"userspace": func(c proxier.Config) (proxier.Engine, error) {
			return userspace.NewEngine(userspace.Config{Config: c, Portals: func(v1.IPFamily) (proxier.Engine, error) {
				return nftables.NewEngine(nftables.Config{Config: c}, family, proxier.Deps{})
			}}, family, proxier.Deps{})
		},
	}
}

func plans(create func(proxier.Config) (proxier.Engine, error), build func(int) cluster) work {
	return func(t *testing.T, size int) func() {
		engine, err := create(proxier.Config{Node: node(), Families: []v1.IPFamily{v1.IPv4Protocol}})
		netnstest.Check(t, err)
		update := updateOf(t, build(size))
		return func() {
			if _, err := engine.Abilities().Plan(update); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// running is a Provider that has programmed a cluster.
func running(t *testing.T, p *proxier.Proxier, c cluster) *proxier.Proxier {
	t.Helper()
	for _, s := range c.services {
		p.OnServiceAdd(s)
	}
	for _, s := range c.slices {
		p.OnEndpointSliceAdd(s)
	}
	proxiertest.Run(t, p)
	netnstest.Check(t, proxiertest.Sync(t.Context(), p))
	return p
}

func recording(t *testing.T, c cluster) *proxier.Proxier {
	t.Helper()
	p, err := proxier.New(proxier.Config{Node: node(), Families: []v1.IPFamily{v1.IPv4Protocol}}, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: &proxiertest.RecordingEngine{}})
	netnstest.Check(t, err)
	return running(t, p, c)
}

func answers(path string, build func(int) cluster) work {
	return func(t *testing.T, size int) func() {
		p := recording(t, build(size))
		return func() {
			w := httptest.NewRecorder()
			r := httptest.NewRequest(http.MethodGet, "/"+path, http.NoBody)
			r.Host = "localhost"
			debughttp.Handler(p).ServeHTTP(w, r)
			if w.Code != http.StatusOK {
				t.Fatalf("%s: %d %s", path, w.Code, w.Body)
			}
		}
	}
}

func scrapes(build func(int) cluster) work {
	return func(t *testing.T, size int) func() {
		registry := prometheus.NewRegistry()
		m, err := metrics.New(registry, metrics.Options{})
		netnstest.Check(t, err)
		m.Watch(metrics.Sources{Status: recording(t, build(size)).Status})
		return func() {
			if _, err := registry.Gather(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// inKernel measures what an engine does with a table of Services in a namespace.
func inKernel(do func(*testing.T, proxier.Engine, desired.Update)) work {
	return func(t *testing.T, size int) func() {
		e, err := nftables.NewEngine(nftables.Config{Config: proxier.Config{Node: node(), NetNS: netnstest.New(t).Path()}}, v1.IPv4Protocol, proxier.Deps{})
		netnstest.Check(t, err)
		t.Cleanup(func() { netnstest.Check(t, e.Close()) })
		update := updateOf(t, manyServices(size))
		fullSync(t, e, update)
		return func() { do(t, e, update) }
	}
}

func fullSync(t *testing.T, e proxier.Engine, update desired.Update) {
	t.Helper()
	_, err := e.Apply(t.Context(), update)
	netnstest.Check(t, err)
}

func dump(t *testing.T, e proxier.Engine, _ desired.Update) {
	t.Helper()
	netnstest.Check(t, e.Abilities().Dump(t.Context(), io.Discard))
}

func verify(t *testing.T, e proxier.Engine, update desired.Update) {
	t.Helper()
	_, err := e.Abilities().Verify(t.Context(), update)
	netnstest.Check(t, err)
}

func firstSync(t *testing.T, e proxier.Engine, update desired.Update) {
	t.Helper()
	netnstest.Check(t, e.Cleanup(t.Context()))
	fullSync(t, e, update)
}
