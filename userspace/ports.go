package userspace

import (
	"errors"
	"math/rand/v2"
	"sync"
)

// errNoPorts says that all ports of the range are in use.
var errNoPorts = errors.New("no port of the range is free")

// portPool hands out the ports of a range in a row from a random one, so that a port
// that is given back comes again as late as possible.
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

// take returns a port; 0 leaves it to the system.
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

func (p *portPool) give(port uint16) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.used, port)
}
