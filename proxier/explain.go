package proxier

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// ErrNotProgrammed says that nothing has been programmed yet in an IP family, or
// that the family is not served.
var ErrNotProgrammed = errors.New("nothing is programmed")

// programmed is what a family's engine was given last with success.
type programmed struct {
	state    *changetracker.State
	resolver desired.Resolver
	globals  desired.Globals
	traits   func(*desired.Service) desired.Traits
}

// Programmed returns what is programmed in an IP family, nil before the first
// success. Of a service port in Status.Failed the kernel may hold something older.
func (p *Proxier) Programmed(family v1.IPFamily) *changetracker.State {
	now, _ := p.programmedOf(family)
	return now.state
}

// programmedOf also returns the service ports that failed.
func (p *Proxier) programmedOf(name v1.IPFamily) (programmed, []*ServiceError) {
	for _, f := range p.families {
		if f.name == name {
			f.mu.Lock()
			defer f.mu.Unlock()
			return f.programmed, f.recorded.Failed
		}
	}
	return programmed{}, nil
}

// Resolved returns what is programmed for one service port, with the frontends that it has
// got. ok is false when there is no such service port.
func (p *Proxier) Resolved(family v1.IPFamily, name changetracker.ServicePortName) (s *desired.Service, ok bool) {
	now, _ := p.programmedOf(family)
	if now.state == nil {
		return nil, false
	}
	return desired.NewResolved(now.state, now.resolver, now.globals).Service(name)
}

// Explain says what becomes of the first packet of a connection: which frontend
// and which endpoints it may go to, why the others are left out, and what happens
// to its source. It tells of what is programmed, not of what is pending, and waits
// for no sync.
//
// The error wraps desired.ErrPacket or ErrNotProgrammed, or says why the node's
// addresses cannot be read.
func (p *Proxier) Explain(ctx context.Context, packet desired.Packet) (desired.Explanation, error) {
	if err := packet.Validate(); err != nil {
		return desired.Explanation{}, err
	}
	family := v1.IPv6Protocol
	if packet.Destination.Addr().Unmap().Is4() {
		family = v1.IPv4Protocol
	}
	p.mu.Lock()
	node := p.node
	p.mu.Unlock()
	now, failures := p.programmedOf(family)
	if now.state == nil {
		return desired.Explanation{}, fmt.Errorf("explain: %w in %s", ErrNotProgrammed, family)
	}
	addrs, err := p.nodeAddresses(ctx, node)
	if err != nil {
		return desired.Explanation{}, fmt.Errorf("explain: %w", err)
	}
	x := desired.Explainer{Resolver: now.resolver, Globals: now.globals, State: now.state, NodeAddresses: addrs, Traits: now.traits}
	e, err := x.Explain(packet)
	if err != nil || e.Service == nil {
		return e, err
	}
	for _, failed := range failures {
		if failed.Name == *e.Service {
			e.Reasons = append(e.Reasons, fmt.Sprintf("but it could not be programmed, and may be as it was before: %v", failed.Err))
		}
	}
	return e, nil
}

func (p *Proxier) nodeAddresses(ctx context.Context, node changetracker.Node) ([]netip.Addr, error) {
	if p.local == nil {
		return slices.Clone(node.Addresses), nil
	}
	addrs, err := p.local(ctx)
	if err != nil {
		return nil, fmt.Errorf("read the node's addresses: %w", err)
	}
	return addrs, nil
}
