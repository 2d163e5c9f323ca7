package cluster

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/proxiertest"
)

const namespace = "shop"

// workload is what users and controllers do: applications with pods and a dual-stack Service,
// and their EndpointSlices.
type workload struct {
	sim   *sim
	api   *apiServer
	nodes []*node
	apps  []*app
	slots int // endpoints per slice
	// What is in use: numbers of pods and of Services, which decide their addresses, and node
	// ports. What is free is used again, the lowest first.
	used, vips, nodePorts map[int]bool
	services              int // how many were created
}

type app struct {
	name               string
	exists             bool
	created            time.Time // like uid and vip: of the Service that exists now
	uid, vip           int
	ports              int
	nodePort           bool
	nodePorts          []int // that it has
	internal, external bool  // policies Local
	affinity, hints    bool
	keepEmpty          bool // slices without endpoints stay
	pods               []*pod
	written            map[string]bool // keys of its slices
}

type pod struct {
	number int
	node   *node
	state  podState
	slot   int // number of its slice
}

type podState int

const (
	starting podState = iota
	ready
	leaving
)

func newWorkload(s *sim, api *apiServer, nodes []*node, apps int) *workload {
	w := &workload{sim: s, api: api, nodes: nodes, slots: 4, used: map[int]bool{}, vips: map[int]bool{}, nodePorts: map[int]bool{}}
	for i := range apps {
		r := rand.New(rand.NewPCG(s.seed, s.number("app", i)))
		a := &app{
			name: fmt.Sprintf("app-%d", i), ports: 1 + r.IntN(2), nodePort: r.IntN(3) == 0,
			internal: r.IntN(5) == 0, external: r.IntN(2) == 0, affinity: r.IntN(4) == 0, hints: r.IntN(3) == 0,
			keepEmpty: r.IntN(2) == 0, written: map[string]bool{},
		}
		w.apps = append(w.apps, a)
		for range r.IntN(7) {
			w.add(a, r).state = ready
		}
		w.create(a)
	}
	return w
}

// take returns the lowest free number.
func take(used map[int]bool) (n int) {
	for used[n] {
		n++
	}
	used[n] = true
	return n
}

// create creates the Service of an application, and its slices.
func (w *workload) create(a *app) {
	w.services++
	a.exists, a.created, a.uid, a.vip = true, time.Now().Truncate(time.Second), w.services, take(w.vips)
	w.publishService(a)
	w.publish(a)
}

// destroy deletes the Service. Its slices stay for a moment.
func (w *workload) destroy(a *app) {
	a.exists = false
	w.freeNodePorts(a)
	delete(w.vips, a.vip)
	w.api.write(servicesKind, namespace+"/"+a.name, nil)
}

func (w *workload) freeNodePorts(a *app) {
	for _, n := range a.nodePorts {
		delete(w.nodePorts, n)
	}
	a.nodePorts = nil
}

// add places a new pod on a node that is up.
func (w *workload) add(a *app, r *rand.Rand) *pod {
	p := &pod{number: take(w.used), node: w.nodes[r.IntN(len(w.nodes))]}
	for range 10 {
		if p.node.up {
			break
		}
		p.node = w.nodes[r.IntN(len(w.nodes))]
	}
	for slices.Index(w.full(a), p.slot) >= 0 {
		p.slot++
	}
	a.pods = append(a.pods, p)
	return p
}

// full lists the slices that have no place.
func (w *workload) full(a *app) (full []int) {
	counts := map[int]int{}
	for _, p := range a.pods {
		if counts[p.slot]++; counts[p.slot] == w.slots {
			full = append(full, p.slot)
		}
	}
	return full
}

func (w *workload) remove(a *app, p *pod) {
	if i := slices.Index(a.pods, p); i >= 0 {
		a.pods = slices.Delete(a.pods, i, i+1)
		delete(w.used, p.number)
		w.publish(a)
	}
}

// drain lets a pod terminate.
func (w *workload) drain(a *app, p *pod, after time.Duration) {
	p.state = leaving
	w.publish(a)
	w.sim.after(after, func() { w.remove(a, p) })
}

// scale creates pods, or drains some.
func (w *workload) scale(a *app, want int, r *rand.Rand) {
	var live []*pod
	for _, p := range a.pods {
		if p.state != leaving {
			live = append(live, p)
		}
	}
	for i := want; i < len(live); i++ {
		w.drain(a, live[i], jitter(r, 2*time.Second))
	}
	for range want - len(live) {
		p := w.add(a, r)
		w.sim.after(jitter(r, 2*time.Second), func() {
			if p.state == starting {
				p.state = ready
				w.publish(a)
			}
		})
	}
	w.publish(a)
}

// roll replaces every pod, one after another.
func (w *workload) roll(a *app, r *rand.Rand) {
	var delay time.Duration
	for _, old := range slices.Clone(a.pods) {
		if old.state == leaving {
			continue
		}
		delay += jitter(r, time.Second)
		w.sim.after(delay, func() {
			if !slices.Contains(a.pods, old) {
				return
			}
			w.add(a, r).state = ready
			w.drain(a, old, 700*time.Millisecond)
		})
	}
}

func jitter(r *rand.Rand, limit time.Duration) time.Duration {
	return time.Millisecond + time.Duration(r.Int64N(int64(limit)))
}

// rebalance packs the pods into as few slices as possible.
func (w *workload) rebalance(a *app, r *rand.Rand) {
	r.Shuffle(len(a.pods), func(i, j int) { a.pods[i], a.pods[j] = a.pods[j], a.pods[i] })
	for i, p := range a.pods {
		p.slot = i / w.slots
	}
	w.publish(a)
}

// publishService writes the Service.
func (w *workload) publishService(a *app) {
	if !a.exists {
		return
	}
	options := []proxiertest.ServiceOption{
		proxiertest.ClusterIPs(fmt.Sprintf("10.96.%d.%d", a.vip/250, 1+a.vip%250), fmt.Sprintf("fd00:96::%x", 1+a.vip)),
		proxiertest.Created(a.created),
	}
	w.freeNodePorts(a)
	for i := range a.ports {
		if a.nodePort {
			n := take(w.nodePorts)
			a.nodePorts = append(a.nodePorts, n)
			options = append(options, proxiertest.NodePort(fmt.Sprintf("p%d", i), v1.ProtocolTCP, int32(80+i), int32(30000+n)))
		} else {
			options = append(options, proxiertest.Port(fmt.Sprintf("p%d", i), v1.ProtocolTCP, int32(80+i)))
		}
	}
	if a.internal {
		options = append(options, proxiertest.InternalPolicyLocal())
	}
	if a.external {
		options = append(options, proxiertest.ExternalPolicyLocal())
	}
	if a.affinity {
		options = append(options, proxiertest.ClientAffinity(time.Hour))
	}
	s := proxiertest.Service(namespace, a.name, options...)
	s.UID = types.UID(fmt.Sprintf("%08d", a.uid))
	w.api.write(servicesKind, namespace+"/"+a.name, s)
}

// publish brings the slices to what the pods are.
func (w *workload) publish(a *app) {
	if !a.exists {
		return
	}
	want := map[string]*discovery.EndpointSlice{}
	for _, p := range a.pods {
		for i, family := range families {
			key := fmt.Sprintf("%s-%d-%s", a.name, p.slot, family)
			if want[key] == nil {
				want[key] = w.newSlice(a, key, discovery.AddressType(family))
			}
			want[key].Endpoints = append(want[key].Endpoints, w.endpoint(a, p, i))
		}
	}
	keys := map[string]bool{}
	for key := range want {
		keys[key] = true
	}
	for key := range a.written {
		keys[key] = true
	}
	for _, key := range sortedKeys(keys) {
		w.publishSlice(a, key, want[key])
	}
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

func (w *workload) newSlice(a *app, key string, family discovery.AddressType) *discovery.EndpointSlice {
	options := []proxiertest.SliceOption{proxiertest.SliceName(key)}
	for i := range a.ports {
		options = append(options, proxiertest.SlicePort(fmt.Sprintf("p%d", i), v1.ProtocolTCP, int32(8080+i)))
	}
	s := proxiertest.Slice(namespace, a.name, family, options...)
	s.CreationTimestamp = metav1.NewTime(w.sim.begin)
	return s
}

func (w *workload) publishSlice(a *app, key string, slice *discovery.EndpointSlice) {
	full := namespace + "/" + key
	if slice == nil && a.keepEmpty && w.api.slice(full) != nil {
		slice = w.newSlice(a, key, w.api.slice(full).AddressType)
	}
	if slice == nil {
		delete(a.written, key)
		w.api.write(slicesKind, full, nil)
		return
	}
	slices.SortFunc(slice.Endpoints, func(a, b discovery.Endpoint) int { return cmp.Compare(a.Addresses[0], b.Addresses[0]) })
	a.written[key] = true
	if !reflect.DeepEqual(w.api.slice(full), slice) {
		w.api.write(slicesKind, full, slice)
	}
}

func (w *workload) endpoint(a *app, p *pod, family int) discovery.Endpoint {
	addr := netip.AddrFrom4([4]byte{10, 244, byte(p.number / 250), byte(1 + p.number%250)})
	if family == 1 {
		addr = netip.MustParseAddr(fmt.Sprintf("fd00:244::%x", 1+p.number))
	}
	options := []proxiertest.EndpointOption{proxiertest.OnNode(p.node.name), proxiertest.InZone(p.node.zone)}
	switch {
	case p.state == leaving:
		options = append(options, proxiertest.Terminating())
	case p.state == starting || !p.node.up:
		options = append(options, proxiertest.NotServing())
	}
	if a.hints {
		options = append(options, func(e *discovery.Endpoint) {
			e.Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: p.node.zone}}}
		})
	}
	s := proxiertest.Slice(namespace, a.name, discovery.AddressTypeIPv4, proxiertest.Endpoint(addr.String(), options...))
	return s.Endpoints[0]
}
