package changetracker

import (
	"maps"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
)

// store is what all trackers of one New share. Everything below mu is guarded by it.
type store struct {
	*config

	mu       sync.Mutex
	node     Node
	families perFamily[*family] // nil: not tracked; does not change
	// owners finds an EndpointSlice by its own name, independent of its labels (W-02).
	owners   map[sliceKey]sliceOwner
	parser   sliceParser
	places   placeNames
	problems problemSet
	sequence uint64 // of triggers
	arrived  EventCounts
	heard    Versions
	lines    []logLine
	gate     gate
}

func newStore(o Options) (*store, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	c := newConfig(o)
	s := &store{
		config: c, node: o.Node.canonical(), parser: sliceParser{config: c},
		owners: map[sliceKey]sliceOwner{}, places: placeNames{}, problems: newProblemSet(), gate: newGate(&o),
	}
	c.warn = func(message string, fields ...zap.Field) {
		s.lines = append(s.lines, logLine{message: message, fields: fields})
	}
	for family, tracked := range c.tracked {
		if tracked {
			s.families[family] = newFamily(c, family, &s.node)
		}
	}
	return s, nil
}

// unlock releases mu and writes the pending log lines.
func (s *store) unlock() {
	lines := s.lines
	s.lines = nil
	s.mu.Unlock()
	for _, l := range lines {
		s.logger.Warn(l.message, l.fields...)
	}
}

// report replaces the problems of an object.
func (s *store) report(f findings) {
	for _, p := range s.problems.replace(f) {
		s.lines = append(s.lines, problemLine(p))
	}
}

// updateService stores a Service, or removes it if service is nil.
func (s *store) updateService(from string, name types.NamespacedName, service *v1.Service) (changed bool) {
	s.mu.Lock()
	defer s.unlock()
	s.arrived.Services++
	f := findings{object: objectKey{from: from, kind: kindService, NamespacedName: name}}
	var ports perFamily[[]*ServicePort]
	if service != nil {
		ports = s.parseService(service, &f)
	}
	s.report(f)
	return s.placePorts(from, name, ports)
}

// setService stores hand-built service ports, which are canonical.
func (s *store) setService(from string, name types.NamespacedName, ports perFamily[[]*ServicePort]) (changed bool) {
	s.mu.Lock()
	defer s.unlock()
	return s.takeService(from, name, ports)
}

// takeService is setService with the lock held.
func (s *store) takeService(from string, name types.NamespacedName, ports perFamily[[]*ServicePort]) (changed bool) {
	s.arrived.Services++
	s.report(findings{object: objectKey{from: from, kind: kindService, NamespacedName: name}})
	return s.placePorts(from, name, ports)
}

func (s *store) placePorts(from string, name types.NamespacedName, ports perFamily[[]*ServicePort]) (changed bool) {
	for index, f := range s.families {
		if f != nil && f.placePorts(from, name, ports[index]) {
			changed = true
		}
	}
	return changed
}

// sliceKey identifies a slice.
type sliceKey struct {
	from string // its Source
	types.NamespacedName
}

func (k sliceKey) sliceName() sliceName { return sliceName{from: k.from, name: k.Name} }

// updateSlice stores or removes an EndpointSlice.
func (s *store) updateSlice(from string, slice *discovery.EndpointSlice, remove bool) (changed bool) {
	if slice == nil || slice.Name == "" || slice.Namespace == "" {
		return false
	}
	s.mu.Lock()
	defer s.unlock()
	key := sliceKey{from: from, NamespacedName: types.NamespacedName{Namespace: slice.Namespace, Name: slice.Name}}
	was, is := s.owners[key], sliceOwner{}
	if !remove {
		is = s.homeOf(slice)
	}
	if was.family != nil && was != is {
		changed = s.evict(key, was)
	}
	if is.family != nil || was.family != nil {
		s.arrived.EndpointSlices++
	}
	found := findings{object: objectKey{from: from, kind: kindEndpointSlice, NamespacedName: key.NamespacedName}}
	if is.family != nil {
		s.owners[key] = is
		changed = s.storeSlice(key, slice, is, &found) || changed
	}
	s.report(found)
	return changed
}

// home is the Service that a slice belongs to, in the family of the slice. It is the zero
// value for slices that are ignored.
type sliceOwner struct {
	family  *family
	service types.NamespacedName
}

// homeOf returns the home of a slice (EPS-01, EPS-02).
func (s *store) homeOf(slice *discovery.EndpointSlice) sliceOwner {
	service := serviceOf(slice)
	index := ipv4
	switch slice.AddressType {
	case discovery.AddressTypeIPv4:
	case discovery.AddressTypeIPv6:
		index = ipv6
	case discovery.AddressTypeFQDN:
		return sliceOwner{}
	default:
		return sliceOwner{}
	}
	if service.Name == "" || s.families[index] == nil {
		return sliceOwner{}
	}
	return sliceOwner{family: s.families[index], service: service}
}

// evict removes a slice from its home, with its triggers.
func (s *store) evict(key sliceKey, from sliceOwner) (changed bool) {
	delete(s.owners, key)
	from.family.triggers.dropSlice(from.service, key.sliceName())
	return from.family.placeSlice(from.service, key.sliceName(), nil)
}

// storeSlice stores a slice in its home.
func (s *store) storeSlice(key sliceKey, slice *discovery.EndpointSlice, into sliceOwner, f *findings) (changed bool) {
	name := key.sliceName()
	s.parser.cluster, s.parser.nodesKnown = s.options.clusterOf(key.from, slice)
	ports, endpoints := s.parser.parse(slice, into.family.index, f)
	defer s.parser.release()
	parsed := heldSlice{sliceName: name, created: slice.CreationTimestamp.Time, ports: ports, endpoints: endpoints}
	held := into.family.held(into.service, name)
	next := s.successor(held, &parsed)
	if next == held {
		return false
	}
	changed = into.family.placeSlice(into.service, name, next)
	if at, ok := s.triggerTime(slice); ok && changed {
		s.sequence++
		into.family.triggers.add(into.service, trigger{slice: name, at: at, sequence: s.sequence})
	}
	return changed
}

// successor returns what to store of a slice: held itself if it is the same, otherwise a
// heldSlice that shares the equal parts with held; nil for a slice without endpoints or ports.
func (s *store) successor(held, parsed *heldSlice) *heldSlice {
	if len(parsed.ports) == 0 {
		return nil
	}
	var samePorts, sameEndpoints bool
	if held != nil {
		samePorts = slices.Equal(held.ports, parsed.ports)
		sameEndpoints = s.sameEndpoints(held.endpoints, parsed.endpoints)
		if samePorts && sameEndpoints && held.created.Equal(parsed.created) {
			return held
		}
	}
	next := *parsed
	if samePorts {
		next.ports = held.ports
	} else {
		next.ports = slices.Clone(parsed.ports)
	}
	if sameEndpoints {
		next.endpoints = held.endpoints
	} else {
		next.endpoints = slices.Clone(parsed.endpoints)
		s.places.share(next.endpoints)
	}
	return &next
}

// setEndpoints stores hand-built endpoints, sorted by address.
func (s *store) setEndpoints(from string, name ServicePortName, endpoints perFamily[[]Endpoint]) (changed bool) {
	s.mu.Lock()
	defer s.unlock()
	return s.takeEndpoints(from, name, endpoints)
}

// takeEndpoints is setEndpoints with the lock held.
func (s *store) takeEndpoints(from string, name ServicePortName, endpoints perFamily[[]Endpoint]) (changed bool) {
	for index, f := range s.families {
		if f == nil {
			continue
		}
		list := dropDuplicates(endpoints[index])
		s.places.share(list)
		if f.setEndpoints(from, name, list) {
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
	s.node = is
	s.gate.known(InputNode)
	if !maps.Equal(was.Labels, is.Labels) {
		for _, f := range s.families {
			changed = f != nil && f.relabelled() || changed
		}
	}
	if was.equal(&is) {
		return changed
	}
	now := s.now()
	for _, f := range s.families {
		if f != nil {
			f.wantFull(now)
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

func (s *store) counts() EventCounts {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.arrived
	services := map[types.NamespacedName]struct{}{}
	for _, f := range s.families {
		if f == nil {
			continue
		}
		c.PendingEndpointSlices += f.counts.slices
		for name := range f.counts.services {
			services[name] = struct{}{}
		}
	}
	c.PendingServices = len(services)
	return c
}

// triggerTime reads the annotation of a slice. It ignores times before the creation of the
// tracker, since their changes were not delayed by it (EPS-51).
func (s *store) triggerTime(slice *discovery.EndpointSlice) (at time.Time, ok bool) {
	text, ok := slice.Annotations[v1.EndpointsLastChangeTriggerTime]
	if !ok {
		return at, false
	}
	at, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		s.warn("trigger time ignored", zap.String("object", kindEndpointSlice+" "+slice.Namespace+"/"+slice.Name),
			zap.String("value", readable(text)))
		return at, false
	}
	return at, at.After(s.created)
}
