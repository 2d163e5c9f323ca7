package ipvs

import (
	"context"
	"errors"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

// wantedPort is a service port with its virtual servers.
type wantedPort struct {
	portState

	virtuals map[serverKey]*virtual
}

// portState is a service port with the keys of its virtual servers, sorted, and the addresses that it
// needs on the device. The zero portState is that of no service port.
type portState struct {
	service *desired.Service
	keys    []serverKey
	vips    []netip.Addr
}

// frontends yields the frontends of a service port, which may be nil.
func frontends(s *desired.Service) iter.Seq2[desired.Key, *desired.Frontend] {
	return func(yield func(desired.Key, *desired.Frontend) bool) {
		for i := 0; s != nil && i < len(s.Frontends); i++ {
			if f := &s.Frontends[i]; !yield(s.Key(f), f) {
				return
			}
		}
	}
}

// claim is a virtual server that a service port needs.
type claim struct {
	*virtual

	name changetracker.ServicePortName
}

func (e *engine) apply(ctx context.Context, update *desired.Update) error {
	if !update.Full && !e.trusted {
		return proxier.ErrNotFull
	}
	e.trusted = false // until this update has succeeded
	if err := e.connect(); err != nil {
		return err
	}
	if update.Full {
		if err := e.observeAll(ctx); err != nil {
			e.disconnect()
			return err
		}
	}
	if err := errors.Join(e.program(ctx, update), e.endLeft()); err != nil {
		e.disconnect()
		return err
	}
	if e.totals != nil {
		e.totals.ledger.Applied(update)
	}
	e.trusted, e.found = true, nil
	return nil
}

// observeAll finds what is there, and takes back the VIPs of a change of mode. Each step needs those before it.
func (e *engine) observeAll(ctx context.Context) error {
	if err := errors.Join(e.device.ensure(), e.findLeft()); err != nil {
		return err
	}
	if err := e.observe(ctx); err != nil {
		return err
	}
	return e.takeBack()
}

// program writes an update in this order: rules that refuse, new addresses, virtual servers,
// old addresses, rules that accept, and the firewall.
func (e *engine) program(ctx context.Context, update *desired.Update) error {
	wanted := e.wanted(update, e.local)
	held := e.held(wanted)
	first, then := holding(*update, held)
	if err := e.applyRules(ctx, &first); err != nil {
		return err
	}
	if len(held) > 0 {
		e.system.waitForPackets()
	}
	began := time.Now()
	e.table.writes = 0
	err := e.applyServers(update, wanted)
	e.result.Report.Writes += e.table.writes
	e.result.Report.Kernel += time.Since(began)
	if err != nil {
		return err
	}
	return errors.Join(e.release(ctx, then), e.firewall.apply(ctx, update))
}

// wanted is what an update needs on a node with these addresses beside those of the device.
func (e *engine) wanted(update *desired.Update, local []netip.Addr) []wantedPort {
	p := planner{config: &e.config, nodeAddrs: nodePortAddrs(local, update.Globals.NodePortAddresses)}
	all := make([]wantedPort, 0, len(update.Changes))
	for s := range update.Services() {
		virtuals := p.virtuals(s)
		maps.DeleteFunc(virtuals, func(key serverKey, _ *virtual) bool { return e.excluded(key.VIP) })
		keys := slices.SortedFunc(maps.Keys(virtuals), desired.Key.Compare)
		all = append(all, wantedPort{portState{s, keys, e.vipsOf(s, local)}, virtuals})
	}
	return all
}

func (e *engine) applyRules(ctx context.Context, update *desired.Update) error {
	refused := e.leavingServers(update)
	result, err := e.rules.Apply(ctx, *update, e.behind(refused))
	e.result.Report, e.result.Left = result.Report, append(e.result.Left, result.Left...)
	if update.Full {
		e.result.Left = slices.AppendSeq(e.result.Left, maps.Keys(refused))
	}
	if err == nil {
		e.refused, e.globals = refused, update.Globals
	}
	return err
}

// behind returns what the rules need to know beside an update.
func (e *engine) behind(refused map[serverKey]bool) nftables.Behind {
	return nftables.Behind{Holds: e.holds(e.local), Refused: refused}
}

// applyServers writes addresses and virtual servers.
func (e *engine) applyServers(update *desired.Update, wanted []wantedPort) error {
	if err := e.bind(wanted); err != nil {
		return err
	}
	errs := []error{e.ownFirst(wanted)}
	for name := range update.Removed() {
		errs = append(errs, e.replacePort(name, portState{}))
	}
	for i := range wanted {
		errs = append(errs, e.setPort(&wanted[i]))
	}
	if update.Full {
		errs = append(errs, e.removeLeftovers())
	}
	return errors.Join(append(errs, e.unbind())...)
}

// own gives a virtual server to a service port. What was counted is that of the last one.
func (e *engine) own(key serverKey, name changetracker.ServicePortName) error {
	var err error
	if last, owned := e.owners[key]; owned && last != name {
		err = e.table.account(key)
	}
	e.owners[key] = name
	return err
}

// ownFirst gives the virtual servers of VIPs to their service ports before any is written: a
// node port of another one, which comes earlier, would drain them for a moment.
func (e *engine) ownFirst(wanted []wantedPort) error {
	var errs []error
	for i := range wanted {
		for key, v := range wanted[i].virtuals {
			if !v.nodePort {
				errs = append(errs, e.own(key, wanted[i].service.Name))
			}
		}
	}
	return errors.Join(errs...)
}

// setPort writes the virtual servers of a service port.
func (e *engine) setPort(w *wantedPort) error {
	name := w.service.Name
	var errs []error
	for _, key := range w.keys {
		v := w.virtuals[key]
		if v.nodePort {
			e.nodePorts[key] = claim{v, name}
		}
		if owner, owned := e.owners[key]; owned && owner != name && v.nodePort {
			continue // a VIP that is an address of the node has precedence
		}
		errs = append(errs, e.own(key, name), e.recordRefusal(name, e.table.set(key, v)))
		if len(v.unfit) > 0 {
			e.result.Failed = append(e.result.Failed, &proxier.ServiceError{Name: name, Err: v.unfitError(key), Partial: true, Terminal: true})
		}
	}
	return errors.Join(append(errs, e.replacePort(name, w.portState))...)
}

// replacePort makes a service port what it is now, and removes what it no longer has.
func (e *engine) replacePort(name changetracker.ServicePortName, now portState) error {
	before := e.services[name]
	e.use(now.vips, 1)
	e.use(before.vips, -1)
	for f := range frontends(before.service) {
		if e.frontends[f] == before.service {
			delete(e.frontends, f)
		}
	}
	for f := range frontends(now.service) {
		e.frontends[f] = now.service
	}
	if e.services[name] = now; now.service == nil {
		delete(e.services, name)
	}
	return e.dropServers(name, before.keys, now.keys)
}

// dropServers removes the virtual servers that a service port no longer has.
func (e *engine) dropServers(name changetracker.ServicePortName, before, now []serverKey) error {
	var errs []error
	for _, key := range before {
		if _, found := slices.BinarySearchFunc(now, key, desired.Key.Compare); found {
			continue
		}
		if e.nodePorts[key].name == name {
			delete(e.nodePorts, key)
		}
		if e.owners[key] == name {
			errs = append(errs, e.handOver(key))
		}
	}
	return errors.Join(errs...)
}

// handOver gives a virtual server to the node port that waits for it, or removes it.
func (e *engine) handOver(key serverKey) error {
	next, waits := e.nodePorts[key]
	if !waits {
		err := e.table.remove(key) // while it is still its own that count
		delete(e.owners, key)
		return err
	}
	return errors.Join(e.own(key, next.name), e.recordRefusal(next.name, e.table.set(key, next.virtual)))
}

// removeLeftovers removes virtual servers without a service port.
func (e *engine) removeLeftovers() error {
	var errs []error
	for _, key := range slices.SortedFunc(maps.Keys(e.table.virtuals), desired.Key.Compare) {
		if _, owned := e.owners[key]; !owned {
			errs = append(errs, e.table.remove(key))
		}
	}
	return errors.Join(errs...)
}

// recordRefusal sets a service port aside if the kernel refuses it. It returns any other
// error, after which the state of the kernel is unknown.
func (e *engine) recordRefusal(name changetracker.ServicePortName, err error) error {
	if err == nil || !isRefusal(err) {
		return err
	}
	e.result.Failed = append(e.result.Failed, &proxier.ServiceError{Name: name, Err: err, Partial: true})
	return nil
}

// isRefusal reports whether all leaves of an error are refusals.
func isRefusal(err error) bool {
	switch err { //nolint:errorlint // it walks the tree itself
	case proxier.ErrNotSupported, unix.EINVAL, unix.ERANGE:
		return true
	}
	switch e := err.(type) { //nolint:errorlint // as above
	case *proxier.UnsupportedError:
		return true
	case interface{ Unwrap() error }:
		return isRefusal(e.Unwrap())
	case interface{ Unwrap() []error }:
		return !slices.ContainsFunc(e.Unwrap(), func(err error) bool { return !isRefusal(err) })
	}
	return false
}

// vipsOf returns the addresses that a service port needs on the device of a node with these others.
func (e *engine) vipsOf(s *desired.Service, local []netip.Addr) []netip.Addr {
	var vips []netip.Addr
	holds := e.holds(local)
	for i := range s.Frontends {
		if vip := s.Frontends[i].VIP; vip.IsValid() && holds(vip) {
			vips = append(vips, vip)
		}
	}
	return slices.Compact(vips) // frontends are sorted by VIP
}

// holds returns a function that reports whether a VIP belongs on the device: not if it is an
// address of the node, or excluded.
func (e *engine) holds(local []netip.Addr) func(vip netip.Addr) bool {
	return func(vip netip.Addr) bool { return !slices.Contains(local, vip) && !e.excluded(vip) }
}

func (e *engine) excluded(a netip.Addr) bool {
	return slices.ContainsFunc(e.config.ExcludeCIDRs, func(p netip.Prefix) bool { return p.Contains(a) })
}

// bind adds addresses to the device.
func (e *engine) bind(wanted []wantedPort) error {
	var added []netip.Addr
	for i := range wanted {
		for _, a := range wanted[i].vips {
			if !e.boundVIPs[a] {
				e.boundVIPs[a] = true
				added = append(added, a)
			}
		}
	}
	e.result.Report.Writes += len(added)
	return e.device.add(added)
}

// unbind removes the addresses that neither a service port nor a draining virtual server
// needs.
func (e *engine) unbind() error {
	var removed []netip.Addr
	for a := range e.table.idle {
		inUse := e.vipUses[a] > 0 || e.table.perAddr[a] > 0 && !slices.Contains(e.local, a)
		if e.boundVIPs[a] && !inUse && !e.excluded(a) {
			removed = append(removed, a)
		}
	}
	if err := e.device.remove(removed); err != nil {
		return err
	}
	for _, a := range removed {
		delete(e.boundVIPs, a)
	}
	clear(e.table.idle)
	e.result.Report.Writes += len(removed)
	return nil
}

// use adds n to the number of service ports that need each address.
func (e *engine) use(vips []netip.Addr, n int) {
	for _, a := range vips {
		if e.vipUses[a] += n; e.vipUses[a] == 0 {
			delete(e.vipUses, a)
			e.table.idle[a] = true
		}
	}
}

// Apply implements proxier.Engine.
func (e *engine) Apply(ctx context.Context, update desired.Update) (proxier.Result, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.result = proxier.Result{Left: e.result.Left}
	err := e.apply(ctx, &update)
	result := e.result
	if err == nil {
		e.result.Left = nil
	}
	return result, err
}
