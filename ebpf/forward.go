package ebpf

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// forwards reports whether a device takes part in the fast path, as far as its name says.
func (c *Config) forwards(device string) bool {
	return c.FastPathDevice == nil || c.FastPathDevice(device)
}

// flowKey is a frontend whose flows are forwarded, as in forward.c: a VIP and port; or, if nodePort is
// set, an endpoint behind it.
type flowKey struct {
	to       netip.AddrPort
	nodePort uint16
	protocol desired.Protocol
}

// flowIndex knows which frontends and ports the service ports of a family need.
type flowIndex struct {
	services map[changetracker.ServicePortName]flowNeed
	// Service ports share keys, if an update moves a frontend, and ports.
	keys  map[flowKey]int
	ports map[uint16]int
	words [portWords]uint64 // has a bit for each port
}

const portWords = 1 << 16 / 64

type flowNeed struct {
	keys  []flowKey
	ports []uint16
}

func newFlowIndex() *flowIndex {
	return &flowIndex{services: map[changetracker.ServicePortName]flowNeed{}, keys: map[flowKey]int{}, ports: map[uint16]int{}}
}

// needOf lists what a service port needs.
func needOf(s *desired.Service) (need flowNeed) {
	ports := map[uint16]bool{}
	for scope := desired.ScopeCluster; scope <= desired.ScopeLocal; scope++ {
		for e := range s.Endpoints(scope).All() {
			ports[e.Port()] = true
		}
	}
	for i := range s.Frontends {
		f := &s.Frontends[i]
		ports[f.Port] = true
		if f.VIP.IsValid() {
			need.keys = append(need.keys, flowKey{to: netip.AddrPortFrom(f.VIP, f.Port), protocol: s.Protocol})
			continue
		}
		for scope := desired.ScopeCluster; scope <= desired.ScopeLocal; scope++ {
			for e := range s.Endpoints(scope).All() {
				need.keys = append(need.keys, flowKey{to: e, nodePort: f.Port, protocol: s.Protocol})
			}
		}
	}
	need.ports = slices.Collect(maps.Keys(ports))
	return need
}

// set gives a service port its need, and returns all keys that may have changed.
func (x *flowIndex) set(name changetracker.ServicePortName, need flowNeed) (touched []flowKey) {
	before := x.services[name]
	for i, side := range []flowNeed{before, need} {
		n := 2*i - 1
		for _, k := range side.keys {
			count(x.keys, k, n)
		}
		for _, p := range side.ports {
			count(x.ports, p, n)
			x.words[p/64] &^= 1 << (p % 64)
			if x.ports[p] > 0 {
				x.words[p/64] |= 1 << (p % 64)
			}
		}
		touched = append(touched, side.keys...)
	}
	if len(need.keys) == 0 {
		delete(x.services, name)
	} else {
		x.services[name] = need
	}
	return touched
}

func count[K comparable](all map[K]int, key K, n int) {
	if all[key] += n; all[key] == 0 {
		delete(all, key)
	}
}
