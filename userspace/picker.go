package userspace

import (
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/jhash"
	"github.com/serviceplane/serviceplane/internal/maglev"
)

// picker chooses among the endpoints of a scope. The balancer's lock guards it.
type picker struct {
	endpoints []netip.AddrPort // sorted
	weights   []uint16         // nil if all are equal
	policy    changetracker.Balancing
	next      int // round robin begins there
	// credit is how much each endpoint lacks of its share, with weights: the one that lacks
	// most is next (smooth weighted round robin).
	credit []int
	// slots are the indexes of endpoints in the table of a consistent hash.
	slots   []uint16
	arrived chan struct{} // closed while there are endpoints
}

// policies are those that sockets have: all.
var policies = desired.Traits{LeastConnections: true} // read-only

// update sets the endpoints. Round robin continues where it was, if possible.
func (p *picker) update(s *desired.Service, scope desired.Scope) {
	endpoints, weights, policy := s.Endpoints(scope).Slice(), s.Weights(scope), policies.Balancing(s)
	same := slices.Equal(p.endpoints, endpoints) && slices.Equal(p.weights, weights)
	if !same {
		p.continueAt(endpoints)
		p.weights, p.slots, p.credit = weights, nil, nil
	}
	if p.policy = policy; !policy.Hashes() {
		p.slots = nil
	} else if p.slots == nil {
		p.slots = maglev.Table(endpoints, weights, s.MaxSlots())
	}
	if weights != nil && p.credit == nil {
		p.credit = make([]int, len(weights))
		for i := range p.credit { // nodes begin with different endpoints
			p.credit[i] = rand.IntN(1 + int(weights[i]))
		}
	}
}

func (p *picker) continueAt(endpoints []netip.AddrPort) {
	switch was, is := len(p.endpoints), len(endpoints); {
	case was > 0 && is > 0:
		p.next, _ = slices.BinarySearchFunc(endpoints, p.endpoints[p.next%was], netip.AddrPort.Compare)
	case is > 0:
		p.next = rand.IntN(is) // nodes begin with different endpoints
		close(p.arrived)
	case was > 0:
		p.arrived = make(chan struct{})
	}
	p.endpoints = endpoints
}

func (p *picker) has(endpoint netip.AddrPort) bool {
	_, ok := slices.BinarySearchFunc(p.endpoints, endpoint, netip.AddrPort.Compare)
	return ok
}

// pick chooses an endpoint that is not in tried. open counts the open connections.
func (p *picker) pick(client netip.AddrPort, tried []netip.AddrPort, open map[netip.AddrPort]int) (endpoint netip.AddrPort, ok bool) {
	switch {
	case p.policy.Hashes():
		return p.byHash(client, tried)
	case p.policy == changetracker.LeastConnections:
		return p.leastOf(tried, func(a, b int) bool { // whether a has less, were it chosen
			return (open[p.endpoints[a]]+1)*p.weight(b) < (open[p.endpoints[b]]+1)*p.weight(a)
		})
	case p.weights != nil:
		return p.inProportion(tried)
	default:
		return p.leastOf(tried, func(int, int) bool { return false })
	}
}

func (p *picker) weight(i int) int {
	if p.weights == nil {
		return 1
	}
	return int(p.weights[i])
}

// byHash takes the endpoint of the client's slot, or, if that does not answer, of the next
// slots.
func (p *picker) byHash(client netip.AddrPort, tried []netip.AddrPort) (endpoint netip.AddrPort, ok bool) {
	if len(p.slots) == 0 {
		return netip.AddrPort{}, false
	}
	if p.policy == changetracker.SourceHash {
		client = netip.AddrPortFrom(client.Addr(), 0)
	}
	at := jhash.Source(client, len(p.slots))
	for i := range p.slots {
		endpoint = p.endpoints[p.slots[(at+i)%len(p.slots)]]
		if !slices.Contains(tried, endpoint) {
			return endpoint, true
		}
	}
	return netip.AddrPort{}, false
}

// leastOf takes the endpoint that is less than all others; those that are equal take turns.
func (p *picker) leastOf(tried []netip.AddrPort, less func(a, b int) bool) (endpoint netip.AddrPort, ok bool) {
	least := -1
	for i := range p.endpoints {
		i = (p.next + i) % len(p.endpoints)
		if slices.Contains(tried, p.endpoints[i]) {
			continue
		}
		if least < 0 || less(i, least) {
			least = i
		}
		if p.policy == changetracker.Random {
			break // all are equal
		}
	}
	if least < 0 {
		return netip.AddrPort{}, false
	}
	p.next = (least + 1) % len(p.endpoints)
	return p.endpoints[least], true
}

// inProportion takes the endpoint that lacks most of its share.
func (p *picker) inProportion(tried []netip.AddrPort) (endpoint netip.AddrPort, ok bool) {
	most, total := -1, 0
	for i, e := range p.endpoints {
		if slices.Contains(tried, e) {
			continue
		}
		p.credit[i] += int(p.weights[i])
		total += int(p.weights[i])
		if most < 0 || p.credit[i] > p.credit[most] {
			most = i
		}
	}
	if most < 0 {
		return netip.AddrPort{}, false
	}
	p.credit[most] -= total
	return p.endpoints[most], true
}
