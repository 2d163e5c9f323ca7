package userspace

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/lightdeps"
)

// socketKey identifies a socket of a service port.
type socketKey struct {
	role Role
	// addr is where it listens; port 0 means any port of Config.Ports.
	addr netip.AddrPort
}

// Plan is for proxier.Abilities: it prints the sockets and their endpoints. Proxy
// ports are chosen when sockets open, so Plan prints neither their numbers nor the
// portals.
func (e *Engine) Plan(update desired.Update) (string, error) {
	var text strings.Builder
	err := e.eachPlanned(&update, func(s *desired.Service, listeners map[socketKey]policy) {
		lines := make([]string, 0, len(listeners))
		for key, p := range listeners {
			lines = append(lines, fmt.Sprintf("  %v: %s -> %v %v\n", key.role, placeText(key.addr), p.Action, s.Endpoints(p.Scope)))
		}
		slices.Sort(lines)
		fmt.Fprintf(&text, "%v\n%s", s.Name, strings.Join(lines, ""))
	})
	return text.String(), err
}

// eachPlanned calls visit with where a new engine would listen for each service port. SCTP is not supported.
func (e *Engine) eachPlanned(update *desired.Update, visit func(*desired.Service, map[socketKey]policy)) error {
	planner := &Engine{config: e.config, family: e.family, portals: e.portals, globals: update.Globals}
	if err := planner.chooseAddress(update); err != nil {
		return err
	}
	for s := range update.Services() {
		if s.Protocol == desired.SCTP {
			continue
		}
		listeners, err := planner.listeners(s)
		if err != nil {
			return err
		}
		visit(s, listeners)
	}
	return nil
}

// plan returns where the service ports of the Changes listen. It moves the sockets that
// they no longer need to e.closing.
func (e *Engine) plan(update *desired.Update) ([]map[socketKey]policy, error) {
	plans := make([]map[socketKey]policy, len(update.Changes))
	for i := range update.Changes {
		want := update.Changes[i].After
		if want == nil {
			continue
		}
		if want.Protocol == desired.SCTP {
			e.remove(want.Name)
			continue
		}
		listeners, err := e.listeners(want)
		if err != nil {
			return nil, err
		}
		plans[i] = listeners
		s := e.services[want.Name]
		if s == nil {
			continue
		}
		e.releaseUnneeded(s, want)
		e.mu.Lock()
		for key, socket := range s.sockets {
			if _, ok := listeners[key]; !ok {
				delete(s.sockets, key)
				socket.retired.Store(true)
				e.closing = append(e.closing, socket)
			}
		}
		e.mu.Unlock()
	}
	return plans, nil
}

// missing returns the service ports that a full update does not contain.
func (e *Engine) missing(update *desired.Update) []changetracker.ServicePortName {
	if !update.Full {
		return nil
	}
	missing := maps.Clone(e.services)
	for i := range update.Changes {
		delete(missing, update.Changes[i].Name)
	}
	return slices.Collect(maps.Keys(missing))
}

var errNoAddress = errors.New("choose the address of proxy ports: this machine has no address of the IP family: set Config.Listen")

// chooseAddress chooses the address of proxy ports. An address found on an interface
// is kept until the next full update.
func (e *Engine) chooseAddress(update *desired.Update) error {
	inFamily := func(a netip.Addr) bool { return a.Is4() == (e.family == v1.IPv4Protocol) }
	node := update.Globals.NodeAddresses
	switch i := slices.IndexFunc(e.config.Listen, inFamily); {
	case i >= 0:
		e.proxyAddr = e.config.Listen[i]
		return nil
	case e.config.Portals == nil:
		e.proxyAddr = desired.Localhost(e.family)
		return nil
	case len(node) > 0:
		e.proxyAddr = node[0]
		return nil
	case !update.Full && e.proxyAddr.IsValid():
		return nil
	}
	e.proxyAddr = netip.Addr{}
	local, err := lightdeps.LocalAddresses(e.config.NetNS)
	if err != nil {
		return err
	}
	for _, addr := range local {
		if inFamily(addr) && addr.IsGlobalUnicast() {
			e.proxyAddr = addr
			return nil
		}
	}
	for range update.Services() { // without Services no address is needed
		return errNoAddress
	}
	return nil
}

// listeners returns where a service port listens, with the policy of each socket.
func (e *Engine) listeners(s *desired.Service) (map[socketKey]policy, error) {
	at := netip.AddrPortFrom(e.proxyAddr, 0)
	listeners := map[socketKey]policy{}
	for i := range s.Frontends {
		f := &s.Frontends[i]
		switch {
		case e.config.AtFrontends:
			addrs, err := e.frontendAddrs(f)
			if err != nil {
				return nil, err
			}
			for _, addr := range addrs {
				listeners[socketKey{roleOf(f), netip.AddrPortFrom(addr, f.Port)}] = policy{f, e.globals.PodCIDRs, e.globals.NodeAddresses}
			}
			continue
		case e.portals == nil:
			listeners[socketKey{roleOf(f), at}] = policy{f, e.globals.PodCIDRs, e.globals.NodeAddresses}
			continue
		}
		if f.Scope == desired.ScopeLocal {
			listeners[socketKey{RoleLocal, at}] = toLocal
		}
		if f.Scope == desired.ScopeCluster || f.ShortCircuit {
			listeners[socketKey{RoleCluster, at}] = toCluster
		}
	}
	return listeners, nil
}

// frontendAddrs returns the addresses of a frontend to listen on. If all addresses
// accept node ports, it is the unspecified address.
func (e *Engine) frontendAddrs(f *desired.Frontend) (addrs []netip.Addr, err error) {
	if f.Kind != desired.NodePort {
		return []netip.Addr{f.VIP}, nil
	}
	accepted := e.globals.NodePortAddresses
	if i := slices.IndexFunc(accepted, func(p netip.Prefix) bool { return p.Bits() == 0 }); i >= 0 {
		return []netip.Addr{accepted[i].Masked().Addr()}, nil
	}
	if len(accepted) == 0 {
		return nil, nil
	}
	loopback := slices.DeleteFunc(slices.Clone(accepted), func(p netip.Prefix) bool { return !p.IsSingleIP() || !p.Addr().IsLoopback() })
	var local []netip.Addr
	if len(loopback) < len(accepted) {
		if local, err = lightdeps.LocalAddresses(e.config.NetNS); err != nil { // the prefixes may contain addresses of other machines
			return nil, err
		}
	}
	for _, p := range loopback { // all of 127.0.0.0/8 is local, but an interface lists only 127.0.0.1
		if !slices.Contains(local, p.Addr()) {
			local = append(local, p.Addr())
		}
	}
	return slices.DeleteFunc(local, func(a netip.Addr) bool { return !contains(accepted, a) }), nil
}

// roleOf returns the role of the socket that serves a frontend.
func roleOf(f *desired.Frontend) Role {
	switch {
	case f.Kind == desired.ClusterIP:
		return RoleInternal
	case f.Restricted:
		return RoleRestricted
	default:
		return RoleExternal
	}
}
