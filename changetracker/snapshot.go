package changetracker

import (
	"iter"
	"net/netip"

	"github.com/serviceplane/serviceplane/internal/persist"
	"k8s.io/apimachinery/pkg/types"
)

// snapshot is the content of a State.
type snapshot struct {
	services       persist.Map[types.NamespacedName, *serviceState]
	index          *index
	indexEndpoints bool
	servicePorts   int
}

func newSnapshot(indexEndpoints bool) snapshot {
	return snapshot{
		services: persist.New[types.NamespacedName, *serviceState](),
		index:    newIndex(), indexEndpoints: indexEndpoints,
	}
}

func (s *snapshot) find(name ServicePortName) *portState {
	service, _ := s.services.Get(name.NamespacedName)
	return service.find(name.key())
}

// entries yields the entries of a kind and address, in order of port and name, starting at a
// port.
func (s *snapshot) entries(kind entryKind, addr netip.Addr, port uint16) iter.Seq[entry] {
	return func(yield func(entry) bool) {
		first := entry{kind: kind, addr: addr, port: port, name: &ServicePortName{}}
		s.index.AscendGreaterOrEqual(first, func(e entry) bool {
			return e.kind == kind && e.addr == addr && yield(e)
		})
	}
}

// names yields the names of the entries of a kind, address and port.
func (s *snapshot) names(kind entryKind, addr netip.Addr, port uint16) iter.Seq[ServicePortName] {
	return func(yield func(ServicePortName) bool) {
		for e := range s.entries(kind, addr, port) {
			if e.port != port || !yield(*e.name) {
				return
			}
		}
	}
}

// snapshotEditor makes the next snapshot.
type snapshotEditor struct {
	services     *persist.Editor[types.NamespacedName, *serviceState]
	index        indexEditor
	servicePorts int
}

func (s *snapshot) edit() *snapshotEditor {
	return &snapshotEditor{
		services:     s.services.Edit(),
		index:        indexEditor{version: s.index, endpoints: s.indexEndpoints},
		servicePorts: s.servicePorts,
	}
}

// put adds or replaces a Service, or removes it if next is nil.
func (e *snapshotEditor) put(name types.NamespacedName, next *serviceState) {
	old, _ := e.services.Get(name)
	e.index.replace(old, next)
	if old != nil {
		e.servicePorts -= old.servicePorts
	}
	if next == nil {
		e.services.Delete(name)
		return
	}
	e.servicePorts += next.servicePorts
	e.services.Set(name, next)
}

func (e *snapshotEditor) snapshot() snapshot {
	return snapshot{
		services: e.services.Map(), index: e.index.freeze(), indexEndpoints: e.index.endpoints, servicePorts: e.servicePorts,
	}
}
