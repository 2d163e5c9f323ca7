package userspace

import (
	"errors"
	"math/rand/v2"
	"sync"
)

var errNoPorts = errors.New("allocate proxy port: all ports of the range are in use: enlarge Config.Ports")

// portPool allocates the ports of a range in ascending order from a random one, so that
// a released port is reused as late as possible.
type portPool struct {
	all PortRange

	mu   sync.Mutex // guards all below
	next int
	used map[uint16]bool
}

func newPortPool(all PortRange) *portPool {
	p := &portPool{all: all, used: map[uint16]bool{}}
	p.next = rand.IntN(p.size())
	return p
}

func (p *portPool) size() int { return int(p.all.Last-p.all.First) + 1 }

// take allocates a port. Without a range it returns 0, and the system chooses.
func (p *portPool) take() (uint16, error) {
	if p.all == (PortRange{}) {
		return 0, nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for range p.size() {
		port := p.all.First + uint16(p.next)
		p.next = (p.next + 1) % p.size()
		if !p.used[port] {
			p.used[port] = true
			return port, nil
		}
	}
	return 0, errNoPorts
}

func (p *portPool) release(port uint16) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.used, port)
}
