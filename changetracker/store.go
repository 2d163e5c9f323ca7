package changetracker

import (
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
)

// store is what all trackers of one New share. Everything below mu is guarded by
// it.
type store struct {
	options Options
	logger  *zap.Logger
	now     func() time.Time
	created time.Time

	mu       sync.Mutex
	node     Node
	families perFamily[*family] // nil: not tracked; does not change
	// slices finds an EndpointSlice by its own name, whatever its labels say (W-02).
	slices   map[types.NamespacedName]*heldSlice
	parser   sliceParser
	problems problemSet
	sequence uint64 // of triggers
	lines    []logLine
}

func newStore(o Options) (*store, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	s := &store{
		options: o, logger: o.Logger, now: o.Now, node: o.Node.canonical(),
		slices: map[types.NamespacedName]*heldSlice{}, problems: newProblemSet(),
	}
	if s.logger == nil {
		s.logger = zap.NewNop()
	}
	if s.now == nil {
		s.now = time.Now
	}
	s.created = s.now()
	s.parser.store = s
	families := o.Families
	if len(families) == 0 {
		families = []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol}
	}
	for _, name := range families {
		index, _ := familyIndex(name) // validated above
		s.families[index] = newFamily(s, index)
	}
	return s, nil
}

// unlock releases mu and writes what there is to log.
func (s *store) unlock() {
	lines := s.lines
	s.lines = nil
	s.mu.Unlock()
	for _, l := range lines {
		s.logger.Warn(l.message, l.fields...)
	}
}

// warn logs a line once the lock is released.
func (s *store) warn(message string, fields ...zap.Field) {
	s.lines = append(s.lines, logLine{message: message, fields: fields})
}

// report puts the problems of an object in the place of its former ones.
func (s *store) report(f findings) {
	for _, p := range s.problems.replace(f) {
		s.lines = append(s.lines, problemLine(p))
	}
}

// updateService takes over a Service; nil means that there is none of that name.
func (s *store) updateService(name types.NamespacedName, service *v1.Service) (changed bool) {
	s.mu.Lock()
	defer s.unlock()
	f := findings{object: objectKey{kind: kindService, NamespacedName: name}}
	var ports perFamily[[]*ServicePort]
	if service != nil {
		ports = s.parseService(service, &f)
	}
	s.report(f)
	return s.placePorts(name, ports)
}

// setService takes over hand-built service ports, which are canonical.
func (s *store) setService(name types.NamespacedName, ports perFamily[[]*ServicePort]) (changed bool) {
	s.mu.Lock()
	defer s.unlock()
	s.report(findings{object: objectKey{kind: kindService, NamespacedName: name}})
	return s.placePorts(name, ports)
}

func (s *store) placePorts(name types.NamespacedName, ports perFamily[[]*ServicePort]) (changed bool) {
	for index, f := range s.families {
		if f != nil && f.placePorts(name, ports[index]) {
			changed = true
		}
	}
	return changed
}

// updateSlice takes over an EndpointSlice, or drops it.
func (s *store) updateSlice(slice *discovery.EndpointSlice, remove bool) (changed bool) {
	if slice == nil || slice.Name == "" || slice.Namespace == "" {
		return false
	}
	s.mu.Lock()
	defer s.unlock()
	name := types.NamespacedName{Namespace: slice.Namespace, Name: slice.Name}
	found := findings{object: objectKey{kind: kindEndpointSlice, NamespacedName: name}}
	held := s.slices[name]
	f, service := s.home(slice)
	if remove || f == nil {
		s.report(found)
		if f != nil { // a slice without endpoints is not held, but it may have had some
			f.triggers.forget(service, slice.Name)
		}
		return s.dropSlice(held)
	}
	if held != nil && (held.service != service || held.family != f.index) {
		changed = s.dropSlice(held)
		held = nil
	}
	parsed := s.parser.parse(slice, f.index, &found)
	defer s.parser.release()
	s.report(found)
	next := s.successor(held, parsed, heldSlice{
		name: slice.Name, service: service, family: f.index, created: slice.CreationTimestamp.Time,
	})
	if next == nil {
		return changed
	}
	if f.placeSlice(service, slice.Name, s.index(name, next)) {
		s.noteTrigger(f, slice, service)
		changed = true
	}
	return changed
}

// home is the family and the Service that a slice belongs to; f is nil for a
// slice that is none of ours (EPS-01, EPS-02).
func (s *store) home(slice *discovery.EndpointSlice) (f *family, service types.NamespacedName) {
	service = types.NamespacedName{Namespace: slice.Namespace, Name: slice.Labels[discovery.LabelServiceName]}
	if service.Name == "" {
		return nil, service
	}
	switch slice.AddressType {
	case discovery.AddressTypeIPv4:
		f = s.families[ipv4]
	case discovery.AddressTypeIPv6:
		f = s.families[ipv6]
	case discovery.AddressTypeFQDN:
	}
	return f, service
}

// successor is next with the parsed endpoints, sharing with held what is the
// same; nil when there would be no difference at all.
func (s *store) successor(held *heldSlice, parsed []portEndpoints, next heldSlice) *heldSlice {
	if held != nil && held.created.Equal(next.created) && slices.EqualFunc(held.ports, parsed, s.samePortEndpoints) {
		return nil
	}
	next.ports = make([]portEndpoints, len(parsed))
	for i, p := range parsed {
		if old := (portEndpoints{p.portKey, held.endpoints(p.portKey)}); s.samePortEndpoints(old, p) {
			next.ports[i] = old
			continue
		}
		next.ports[i] = portEndpoints{p.portKey, slices.Clone(p.endpoints)}
	}
	h := next // so that only here something is allocated
	return &h
}

func (s *store) samePortEndpoints(a, b portEndpoints) bool {
	if a.portKey != b.portKey || len(a.endpoints) != len(b.endpoints) {
		return false
	}
	for i := range a.endpoints {
		if !s.sameEndpoint(&a.endpoints[i], &b.endpoints[i]) {
			return false
		}
	}
	return true
}

// index notes a slice under its own name. A slice that has nothing to say is not
// kept.
func (s *store) index(name types.NamespacedName, h *heldSlice) *heldSlice {
	if len(h.ports) == 0 {
		delete(s.slices, name)
		return nil
	}
	s.slices[name] = h
	return h
}

// reindex follows a slice that was replaced by a copy.
func (s *store) reindex(h *heldSlice) {
	if h.name != "" {
		s.slices[types.NamespacedName{Namespace: h.service.Namespace, Name: h.name}] = h
	}
}

// dropSlice removes a slice, and the triggers that came with it.
func (s *store) dropSlice(held *heldSlice) (changed bool) {
	if held == nil {
		return false
	}
	delete(s.slices, types.NamespacedName{Namespace: held.service.Namespace, Name: held.name})
	f := s.families[held.family]
	f.triggers.forget(held.service, held.name)
	return f.placeSlice(held.service, held.name, nil)
}

func (s *store) noteTrigger(f *family, slice *discovery.EndpointSlice, service types.NamespacedName) {
	if at, ok := s.triggerTime(slice); ok {
		s.sequence++
		f.triggers.add(service, trigger{slice: slice.Name, at: at, sequence: s.sequence})
	}
}

// setEndpoints takes over hand-built endpoints, sorted by address.
func (s *store) setEndpoints(name ServicePortName, endpoints perFamily[[]Endpoint]) (changed bool) {
	s.mu.Lock()
	defer s.unlock()
	for index, f := range s.families {
		if f == nil {
			continue
		}
		list := endpoints[index]
		for i := range list {
			if list[i].Node != "" {
				list[i].Local = s.node.hosts(list[i].Node)
			}
		}
		if f.setEndpoints(name, dropDuplicates(list)) {
			changed = true
		}
	}
	return changed
}

// setNode is Tracker.SetNode.
func (s *store) setNode(node Node) (changed bool) {
	s.mu.Lock()
	defer s.unlock()
	was, is := s.node, node.canonical()
	if was.equal(&is) {
		return false
	}
	s.node = is
	now := s.now()
	for _, f := range s.families {
		if f == nil {
			continue
		}
		f.wantFull(now)
		if was.Name != is.Name {
			f.relocate(&was, &is)
		}
	}
	return true
}

// waiting is Tracker.PendingSince.
func (s *store) waiting(family v1.IPFamily) time.Time {
	index, ok := familyIndex(family)
	if !ok || s.families[index] == nil {
		return time.Time{}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.families[index].waiting()
}

func (s *store) allProblems() []Problem {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.problems.all()
}

func (s *store) problemCounts() map[Reason]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.problems.byReason()
}
