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
	return p.programmedOf(family).state
}

// programmedOf returns the input of the last successful Apply.
func (p *Proxier) programmedOf(name v1.IPFamily) (now programmed) {
	if f := p.family(name); f != nil {
		now = f.current()
	}
	return now
}

// family returns that of a name, nil if it is not served.
func (p *Proxier) family(name v1.IPFamily) *family {
	for _, f := range p.families {
		if f.name == name {
			return f
		}
	}
	return nil
}

// Resolved returns what is programmed in an IP family: each service port without the frontends
// that belong to another one. It is nil, and has no service ports, before the first successful
// sync, and the same until the next one.
func (p *Proxier) Resolved(family v1.IPFamily) *desired.Resolved {
	return p.programmedOf(family).resolved
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
	now := p.programmedOf(family)
	if now.state == nil {
		return desired.Explanation{}, fmt.Errorf("explain: %w in %s", ErrNotProgrammed, family)
	}
	addrs, err := p.nodeAddresses(ctx, node)
	if err != nil {
		return desired.Explanation{}, fmt.Errorf("explain: %w", err)
	}
	e, err := now.resolved.Explain(packet, addrs, now.traits)
	if err != nil || e.Service == nil {
		return e, err
	}
	if failed := p.family(family).failure(*e.Service); failed != nil {
		e.Reasons = append(e.Reasons, fmt.Sprintf("not programmed, the kernel may hold an older version: %v", failed.Err))
	}
	return e, nil
}

// failure is why a service port is not programmed as it should be; nil if it is.
func (f *family) failure(name changetracker.ServicePortName) *ServiceError {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r := f.ports.byName[name]; r != nil {
		return r.failed
	}
	return nil
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
