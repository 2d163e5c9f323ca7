package cluster

import (
	"maps"
	"slices"
	"strconv"
	"time"

	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// kind is a resource that the nodes watch.
type kind int

const (
	servicesKind kind = iota
	slicesKind
	kinds
)

// entry is one write to the API: its position in the log is its resource version.
type entry struct {
	kind kind
	key  string
	obj  metav1.Object // nil if the object was deleted; immutable
	at   time.Time
}

// apiServer is etcd: the log of all writes, and the latest state. Clients see it only through
// the watch caches of its replicas.
type apiServer struct {
	sim      *sim
	log      []entry
	latest   [kinds]map[string]metav1.Object
	replicas []*replica
}

func newAPIServer(s *sim, replicas int) *apiServer {
	a := &apiServer{sim: s, latest: newStores()}
	for i := range replicas {
		a.replicas = append(a.replicas, &replica{api: a, id: i, store: newStores()})
	}
	return a
}

func newStores() (stores [kinds]map[string]metav1.Object) {
	for k := range stores {
		stores[k] = map[string]metav1.Object{}
	}
	return stores
}

// write creates, replaces or, with nil, deletes an object.
func (a *apiServer) write(k kind, key string, obj metav1.Object) {
	if obj == nil {
		if _, exists := a.latest[k][key]; !exists {
			return
		}
		delete(a.latest[k], key)
	} else {
		a.latest[k][key] = obj
	}
	a.log = append(a.log, entry{k, key, obj, time.Now()})
	for _, r := range a.replicas {
		lag := a.sim.span(time.Millisecond, 20*time.Millisecond, "lag", r.id, len(a.log))
		a.sim.after(lag, r.advance)
	}
}

func (a *apiServer) slice(key string) *discovery.EndpointSlice {
	s, _ := a.latest[slicesKind][key].(*discovery.EndpointSlice)
	return s
}

// replica is the watch cache of one API server process: a prefix of the log.
type replica struct {
	api     *apiServer
	id      int
	applied int // how many entries of the log it has
	store   [kinds]map[string]metav1.Object
	stalled time.Time // until then it stays as it is
	watches []*reflector
}

// advance takes the next entry of the log, and sends it to the watches.
func (r *replica) advance() {
	if now := time.Now(); now.Before(r.stalled) {
		r.api.sim.at(r.stalled.Add(r.api.sim.span(1, time.Millisecond, "stalled", r.id, r.applied)), r.advance)
		return
	}
	e := r.api.log[r.applied]
	r.applied++
	if e.obj == nil {
		delete(r.store[e.kind], e.key)
	} else {
		r.store[e.kind][e.key] = e.obj
	}
	for _, w := range r.watches {
		w.send(r.applied - 1)
	}
}

func (r *replica) unsubscribe(f *reflector) {
	r.watches = slices.DeleteFunc(r.watches, func(o *reflector) bool { return o == f })
}

// reflector keeps a copy of one kind in a proxy process: it lists, watches, and lists again if
// the replica does not have the changes any more that it missed. It delivers the differences
// as an informer does.
type reflector struct {
	proc    *process
	kind    kind
	replica *replica
	rv      int // how much of the log it has received
	sent    int // how much is on its way to it
	epoch   int // of its connection; what is on its way in an older one is lost
	last    time.Time
	listed  bool // the first list has arrived
	cache   map[string]metav1.Object
}

// connect watches at a replica from where the reflector is.
func (f *reflector) connect(r *replica) {
	f.disconnect()
	f.replica, f.sent = r, f.rv
	switch s := f.proc.node.sim; {
	case !f.listed:
		f.list()
	case s.quirks.skipMissed:
		f.sent = max(f.sent, r.applied)
		f.watch()
	case r.applied-f.rv > s.window:
		f.list()
	default:
		s.note(watchResumed)
		f.watch()
	}
}

func (f *reflector) disconnect() {
	if f.replica != nil {
		f.replica.unsubscribe(f)
		f.replica = nil
	}
	f.epoch++
}

func (f *reflector) watch() {
	f.replica.watches = append(f.replica.watches, f)
	for f.sent < f.replica.applied {
		f.send(f.sent)
	}
}

// send puts an entry on its way. A replica that is behind the reflector sends nothing until
// it has caught up.
func (f *reflector) send(position int) {
	if position < f.sent {
		return
	}
	f.sent = position + 1
	e, epoch := f.proc.node.api.log[position], f.epoch
	if e.kind != f.kind {
		return
	}
	f.schedule(f.proc.node.sim.span(100*time.Microsecond, 5*time.Millisecond, "watch", f.proc.node.id, position), func() {
		if f.epoch == epoch && !f.proc.stopped {
			f.rv = position + 1
			f.proc.node.newest = max(f.proc.node.newest, f.rv)
			f.deliver(e.key, e.obj, change{position, e.at})
			f.proc.feed.OnVersion(f.kind.input(), f.version())
		}
	})
}

// schedule runs a step after the ones before.
func (f *reflector) schedule(d time.Duration, step func()) {
	at := time.Now().Add(d)
	if !at.After(f.last) {
		at = f.last.Add(f.proc.node.sim.span(1, 10*time.Microsecond, "step", f.proc.node.id, int(f.last.UnixNano())))
	}
	f.last = at
	f.proc.node.sim.at(at, step)
}

// list asks for everything. The first list of a process takes what the replica has, however
// old (resourceVersion=0); a later one only a state that is not older than what it knows.
func (f *reflector) list() {
	s, epoch := f.proc.node.sim, f.epoch
	f.schedule(s.span(time.Millisecond, 10*time.Millisecond, "list", f.proc.node.id, f.epoch), func() {
		switch {
		case f.epoch != epoch || f.proc.stopped:
		case f.replica.applied < f.rv:
			s.after(s.span(50*time.Millisecond, 100*time.Millisecond, "wait", f.proc.node.id, f.epoch), func() {
				if f.epoch == epoch {
					f.list()
				}
			})
		default:
			f.replace()
		}
	})
}

// replace takes over the answer of a list, item by item, as additions, updates and deletions,
// and then watches.
func (f *reflector) replace() {
	s, items := f.proc.node.sim, maps.Clone(f.replica.store[f.kind])
	f.noteList(items)
	f.rv, f.sent, f.listed = f.replica.applied, f.replica.applied, true
	for k := range f.cache {
		if _, exists := items[k]; !exists && !s.quirks.relistAdds {
			items[k] = nil
		}
	}
	version := f.version()
	keys := slices.Sorted(maps.Keys(items))
	slices.SortStableFunc(keys, func(a, b string) int { return deleted(items[a]) - deleted(items[b]) })
	for chunk := range slices.Chunk(keys, f.chunk()) {
		f.schedule(time.Microsecond, func() {
			for _, k := range chunk {
				if !f.proc.stopped {
					f.deliver(k, items[k], change{})
				}
			}
		})
	}
	f.schedule(time.Microsecond, func() {
		if !f.proc.stopped {
			f.proc.feed.OnVersion(f.kind.input(), version)
			f.proc.finish(f.kind)
		}
	})
	f.watch()
}

// noteList counts what a list shows that the process has not seen happen.
func (f *reflector) noteList(items map[string]metav1.Object) {
	n := f.proc.node
	switch {
	case f.listed:
		n.sim.note(listedAgain)
	case f.replica.applied < n.newest:
		n.sim.note(listedOld)
	}
	n.newest = max(n.newest, f.replica.applied)
	for k, old := range f.cache {
		if now := items[k]; now == nil {
			n.sim.note(missedDelete)
		} else if now.GetUID() != old.GetUID() {
			n.sim.note(missedReplace)
		}
	}
}

// version is what the reflector has received, or will have when it has taken over a list.
func (f *reflector) version() string { return strconv.Itoa(f.rv) }

// input is what the Provider calls a kind.
func (k kind) input() changetracker.Input {
	if k == servicesKind {
		return changetracker.InputServices
	}
	return changetracker.InputEndpointSlices
}

func deleted(obj metav1.Object) int {
	if obj == nil {
		return 1
	}
	return 0
}

// chunk is how many items of a list are delivered at once. While the process programs nothing
// yet, it makes no difference, and more of them make large clusters faster.
func (f *reflector) chunk() int {
	if !f.proc.synced() {
		return 64
	}
	return 1
}

// deliver brings one object to the handlers. The change is zero if it comes from a list.
func (f *reflector) deliver(key string, obj metav1.Object, c change) {
	before := f.cache[key]
	if before == nil && obj == nil {
		return
	}
	f.proc.observe(f.kind, key, [2]metav1.Object{before, obj}, c)
	if obj == nil {
		delete(f.cache, key)
	} else {
		f.cache[key] = obj
	}
	if f.kind == servicesKind {
		feed(before, obj, f.proc.feed.OnServiceAdd, f.proc.feed.OnServiceUpdate, f.proc.feed.OnServiceDelete)
	} else {
		feed(before, obj, f.proc.feed.OnEndpointSliceAdd, f.proc.feed.OnEndpointSliceUpdate, f.proc.feed.OnEndpointSliceDelete)
	}
}

func feed[T metav1.Object](before, after metav1.Object, add func(T), update func(before, after T), remove func(T)) {
	switch {
	case before == nil:
		add(after.(T))
	case after == nil:
		remove(before.(T))
	default:
		update(before.(T), after.(T))
	}
}

// resync delivers everything again, as informers do from time to time.
func (f *reflector) resync() {
	for _, k := range slices.Sorted(maps.Keys(f.cache)) {
		f.schedule(time.Microsecond, func() {
			if obj := f.cache[k]; obj != nil && !f.proc.stopped {
				f.deliver(k, obj, change{})
			}
		})
	}
}
