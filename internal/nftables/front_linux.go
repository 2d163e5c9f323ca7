package nftables

import (
	"context"
	"encoding/binary"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// Front handles packets in front of an engine such as ipvs, which then only chooses the
// endpoint: a Front drops, rejects and masquerades. It does not translate.
type Front struct {
	*Engine

	// refused is Behind.Refused, as it is in the kernel.
	refused map[desired.Key]bool
}

// Behind is the state of the engine behind a Front, passed with each update.
type Behind struct {
	// Holds reports whether a VIP is an address of the node only because that engine added
	// it. The VIP's other ports are rejected, so that clients do not reach programs of the
	// node, and connections from the VIP are masqueraded.
	Holds func(vip netip.Addr) bool
	// Refused are all frontends that accept no new connections although no service port has
	// them. The map must not be changed afterwards.
	Refused map[desired.Key]bool
}

// NewFront returns the engine of one family. traits are those of the engine behind.
func NewFront(config proxier.Config, family v1.IPFamily, deps proxier.Deps, traits func(*desired.Service) desired.Traits) (*Front, error) {
	config.CountConnections = false // the engine behind knows the endpoints
	e, err := NewEngine(Config{Config: config}, family, deps)
	if err != nil {
		return nil, err
	}
	e.holds, e.behind = func(netip.Addr) bool { return false }, traits
	return &Front{Engine: e}, nil
}

// Apply is proxier.Engine's Apply, with the state of the engine behind.
func (f *Front) Apply(ctx context.Context, update desired.Update, behind Behind) (proxier.Result, error) {
	if update.Full {
		f.refused = nil
	}
	f.holds = behind.Holds
	var gone, come []desired.Change
	for _, key := range missing(f.refused, behind.Refused) {
		gone = append(gone, desired.Change{Name: refusedName(key)})
	}
	for _, key := range missing(behind.Refused, f.refused) {
		come = append(come, desired.ChangesTo(refusal(key))...)
	}
	if len(gone)+len(come) > 0 {
		update.Changes = slices.Concat(gone, update.Changes, come)
	}
	result, err := f.Engine.Apply(ctx, update)
	if err == nil { // otherwise the next one is full
		f.refused = behind.Refused
	}
	return result, err
}

// missing returns the keys that others does not have, sorted.
func missing(keys, others map[desired.Key]bool) (list []desired.Key) {
	for key := range keys {
		if !others[key] {
			list = append(list, key)
		}
	}
	slices.SortFunc(list, desired.Key.Compare)
	return list
}

// refusal is the placement of a refused frontend.
func refusal(key desired.Key) *desired.Service {
	return &desired.Service{
		Name: refusedName(key), Protocol: key.Protocol,
		Frontends: []desired.Frontend{{
			VIP: key.VIP, Port: key.Port, Scope: desired.ScopeCluster, Action: desired.Reject, Masquerade: desired.MasqueradeNone,
		}},
	}
}

// refusedName cannot be the name of a Service, because it has no namespace.
func refusedName(key desired.Key) changetracker.ServicePortName {
	return changetracker.ServicePortName{Port: key.String()}
}

// Plan is for proxier.Abilities.
func (f *Front) Plan(update desired.Update, holds func(vip netip.Addr) bool) (string, error) {
	return f.plan(update, holds)
}

// Verify is for proxier.Abilities, with the state of the engine behind.
func (f *Front) Verify(ctx context.Context, update desired.Update, behind Behind) (proxier.Verification, error) {
	update.Changes = slices.Clone(update.Changes)
	for _, key := range missing(behind.Refused, nil) {
		update.Changes = append(update.Changes, desired.ChangesTo(refusal(key))...)
	}
	return f.verify(ctx, &update, behind.Holds)
}

// Frontends returns the frontends of the table in the kernel, and whether each is open to
// everybody. Before the first Apply these are the frontends of the previous process.
func (f *Front) Frontends(ctx context.Context) (map[desired.Key]bool, error) {
	if err := f.connect(); err != nil {
		return nil, err
	}
	o, err := f.observe(ctx)
	if err != nil || o == nil {
		return nil, err
	}
	l := f.layoutFor(&desired.Globals{})
	if !o.isOurs(&l) {
		return nil, nil
	}
	open := map[desired.Key]bool{}
	for _, id := range []setID{setServices, setNodePorts} {
		if _, there := o.sets[setSpecs[id].name]; !there {
			continue
		}
		if err := f.observeSet(ctx, o, &setSpecs[id]); err != nil {
			return nil, err
		}
		for text, class := range o.element[id] {
			open[parseFrontendKey([]byte(text))] = isOpen(class)
		}
	}
	return open, nil
}

// isOpen reports whether a frontend of this class, as the kernel stores it, refuses nobody.
func isOpen(class string) bool {
	if len(class) != 4 {
		return false
	}
	switch binary.NativeEndian.Uint32([]byte(class)) {
	case classReject, classDrop, classFirewall, classLocal:
		return false
	}
	return true
}

// parseFrontendKey is the inverse of frontendKey.
func parseFrontendKey(b []byte) (k desired.Key) {
	const protoAndPort = 8
	if n := len(b) - protoAndPort; n > 0 {
		k.VIP, _ = netip.AddrFromSlice(b[:n])
		b = b[n:]
	}
	k.Protocol, k.Port = desired.Protocol(b[0]), binary.BigEndian.Uint16(b[4:])
	return k
}
