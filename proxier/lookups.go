package proxier

import (
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
)

// mostLookups bounds the addresses that lookups remembers, lookupsFor how long after the last question.
const (
	mostLookups = 1024
	lookupsFor  = time.Minute
)

// lookups finds the service ports that have an endpoint with an address. The first question about
// an address looks at all endpoints, a later one at what has changed since. So who asks nothing pays
// nothing; with Options.IndexEndpoints no question looks at all endpoints.
type lookups struct {
	mu    sync.Mutex // guards all below
	state *changetracker.State
	asked time.Time // the last question
	// names are those of each address that was asked for, and addrs the addresses of each of their Services.
	names map[netip.Addr]map[changetracker.ServicePortName]bool
	addrs map[types.NamespacedName]map[netip.Addr]bool
}

// find returns the service ports of a State that have an endpoint with one of these addresses, by address.
func (l *lookups) find(state *changetracker.State, asked []netip.Addr) map[netip.Addr][]changetracker.ServicePortName {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asked = time.Now()
	if l.names == nil || len(l.names)+len(asked) > mostLookups {
		l.names, l.addrs = map[netip.Addr]map[changetracker.ServicePortName]bool{}, map[types.NamespacedName]map[netip.Addr]bool{}
	}
	l.follow(state)
	missing := map[netip.Addr]bool{}
	for _, addr := range asked {
		if l.names[addr] == nil {
			missing[addr], l.names[addr] = true, map[changetracker.ServicePortName]bool{}
		}
	}
	if len(missing) > 0 {
		for name := range state.All() {
			l.add(state, name, func(addr netip.Addr) bool { return missing[addr] })
		}
	}
	found := make(map[netip.Addr][]changetracker.ServicePortName, len(asked))
	for _, addr := range asked {
		found[addr] = slices.SortedFunc(maps.Keys(l.names[addr]), changetracker.ServicePortName.Compare)
	}
	return found
}

// forget drops all if nobody has asked for long: it keeps a State in memory.
func (l *lookups) forget(now time.Time) {
	if !l.mu.TryLock() { // somebody asks
		return
	}
	defer l.mu.Unlock()
	if l.state != nil && now.Sub(l.asked) > lookupsFor {
		l.state, l.names, l.addrs = nil, nil, nil
	}
}

// follow takes over what has changed.
func (l *lookups) follow(state *changetracker.State) {
	was := l.state
	if l.state = state; was == state || len(l.names) == 0 {
		return
	}
	for service := range state.Changed(was) {
		for addr := range l.addrs[service] {
			maps.DeleteFunc(l.names[addr], func(name changetracker.ServicePortName, _ bool) bool { return name.NamespacedName == service })
		}
		delete(l.addrs, service)
		for _, name := range state.ServicePorts(service) {
			l.add(state, name, func(addr netip.Addr) bool { return l.names[addr] != nil })
		}
	}
}

// add looks at the endpoints of a service port.
func (l *lookups) add(state *changetracker.State, name changetracker.ServicePortName, wanted func(netip.Addr) bool) {
	state.EachEndpoint(name, func(e *changetracker.Endpoint) {
		addr := e.Addr.Addr()
		if !wanted(addr) {
			return
		}
		l.names[addr][name] = true
		if l.addrs[name.NamespacedName] == nil {
			l.addrs[name.NamespacedName] = map[netip.Addr]bool{}
		}
		l.addrs[name.NamespacedName][addr] = true
	})
}
