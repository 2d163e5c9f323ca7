package proxier

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// Programmed returns the State that is programmed in an IP family, nil before the first
// successful sync. For a service port in Status.Failed the kernel may hold an older one.
func (p *Proxier) Programmed(family v1.IPFamily) *changetracker.State {
	now, _ := p.programmedOf(family)
	return now.state
}

// programmedOf returns the input of the last successful Apply, and the failed service ports.
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

// Resolved returns what is programmed in an IP family: each service port without the frontends
// that belong to another one. It is nil, and has no service ports, before the first successful
// sync, and the same until the next one.
func (p *Proxier) Resolved(family v1.IPFamily) *desired.Resolved {
	now, _ := p.programmedOf(family)
	return now.resolved
}

// Explain reports what happens to the first packet of a connection: its frontend, the
// endpoints that it may be sent to, why other endpoints are excluded, and whether its source
// is masqueraded. It describes what is programmed, without pending changes, and does not
// wait for a sync.
//
// The error wraps desired.ErrPacket, ErrNotProgrammed, or the error of Deps.LocalAddresses.
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
			e.Reasons = append(e.Reasons, fmt.Sprintf("not programmed, the kernel may hold an older version: %v", failed.Err))
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
