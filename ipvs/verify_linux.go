package ipvs

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

// Verify is for proxier.Abilities: see NewEngine.
func (e *engine) Verify(ctx context.Context, update desired.Update) (proxier.Verification, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	v := &verification{engine: e, want: map[serverKey]claim{}, vips: map[netip.Addr]changetracker.ServicePortName{}}
	elsewhere, err := e.verifyServers(v, &update)
	if err != nil {
		return proxier.Verification{}, err
	}
	rules, err := e.rules.Verify(ctx, update, nftables.Behind{Holds: e.holds(elsewhere), Refused: e.refused})
	v.join(rules)
	if err == nil {
		err = e.verifyFirewall(ctx, &update, v)
	}
	return v.report, err
}

// verifyServers compares all but the rules. It returns the addresses that the node has elsewhere.
func (e *engine) verifyServers(v *verification, update *desired.Update) (elsewhere []netip.Addr, err error) {
	if e.kernel == nil { // without the writes of connect
		if err := e.openAll(); err != nil {
			return nil, err
		}
		defer e.disconnect()
	}
	if err := e.device.find(); err != nil {
		return nil, err
	}
	if v.here, elsewhere, err = e.device.addresses(); err != nil {
		return nil, err
	}
	if v.have, err = e.kernel.List(); err != nil {
		return nil, err
	}
	v.expect(update, elsewhere)
	v.servers()
	v.addresses()
	return elsewhere, nil
}

// verifyFirewall asks the engine that opens health check node ports, if it can verify.
func (e *engine) verifyFirewall(ctx context.Context, update *desired.Update, v *verification) error {
	if e.firewall == nil || e.firewall.missing {
		return nil
	}
	verify := e.firewall.engine.Abilities().Verify
	if verify == nil {
		return nil
	}
	report, err := verify(ctx, e.firewall.update(update))
	v.join(report)
	return err
}

// verification compares what the kernel has with what a new engine would write.
type verification struct {
	engine *engine
	here   map[netip.Addr]bool
	have   map[serverKey]*virtual
	want   map[serverKey]claim
	vips   map[netip.Addr]changetracker.ServicePortName // wanted on the device; the zero name if several ports need it
	report proxier.Verification
}

func (v *verification) join(r proxier.Verification) {
	v.report.Checked += r.Checked
	v.report.Differences = append(v.report.Differences, r.Differences...)
}

// expect plans the virtual servers and the addresses of the device.
func (v *verification) expect(update *desired.Update, elsewhere []netip.Addr) {
	for _, w := range v.engine.wanted(update, elsewhere) {
		for key, server := range w.virtuals {
			if other, taken := v.want[key]; !taken || other.nodePort && !server.nodePort {
				v.want[key] = claim{server, w.service.Name}
			}
		}
		for _, vip := range w.vips {
			if name, known := v.vips[vip]; known && name != w.service.Name {
				v.vips[vip] = changetracker.ServicePortName{}
			} else {
				v.vips[vip] = w.service.Name
			}
		}
	}
}

func (v *verification) differs(object, problem, want, have string, service changetracker.ServicePortName) {
	v.report.Differences = append(v.report.Differences, proxier.Difference{Object: object, Problem: problem, Want: want, Have: have, Service: service})
}

func (v *verification) servers() {
	for key, want := range v.want {
		object := fmt.Sprintf("virtual server %v", key)
		v.report.Checked++
		have := v.have[key]
		switch {
		case have == nil && len(want.reals) == 0:
			continue // it exists only while connections continue
		case have == nil:
			v.differs(object, proxier.DifferenceMissing, want.String(), "", want.name)
			continue
		case !v.satisfied(have, want.virtual):
			v.differs(object, proxier.DifferenceChanged, want.String(), have.String(), want.name)
		}
		v.reals(key, want, have.reals)
	}
	for key, have := range v.have {
		addr := key.VIP
		if _, wanted := v.want[key]; wanted || !v.here[addr] || v.engine.excluded(addr) || drains(key, have) {
			continue
		}
		v.differs(fmt.Sprintf("virtual server %v", key), proxier.DifferenceUnexpected, "", have.String(), changetracker.ServicePortName{})
	}
}

// drains reports whether a virtual server that is not wanted waits for its connections.
func drains(key serverKey, have *virtual) bool {
	for _, weight := range have.reals {
		if weight != 0 {
			return false
		}
	}
	return len(have.reals) > 0 && key.Protocol != desired.UDP
}

func (v *verification) satisfied(had *virtual, want *virtual) bool {
	have := had.settings
	if len(had.reals) == 0 { // only real servers have a forwarding method
		have.forward = want.forward
	}
	lacks := v.engine.table != nil && v.engine.table.lacks[want.scheduler]
	return have.satisfy(want.settings) || lacks && have.satisfy(want.instead)
}

func (v *verification) reals(key serverKey, want claim, have map[netip.AddrPort]int) {
	for addr, weight := range want.reals {
		v.report.Checked++
		text := fmt.Sprintf("weight %d", weight)
		switch had, ok := have[addr]; {
		case !ok:
			v.differs(object(key, addr), proxier.DifferenceMissing, text, "", want.name)
		case had != weight:
			v.differs(object(key, addr), proxier.DifferenceChanged, text, fmt.Sprintf("weight %d", had), want.name)
		}
	}
	for addr, weight := range have {
		if _, wanted := want.reals[addr]; !wanted && (weight != 0 || key.Protocol == desired.UDP && !want.serving.Has(addr)) {
			v.differs(object(key, addr), proxier.DifferenceUnexpected, "", fmt.Sprintf("weight %d", weight), want.name)
		}
	}
}

// addresses compares those of the device. Draining virtual servers keep theirs.
func (v *verification) addresses() {
	where := " of device " + v.engine.config.Names.Device
	for vip, name := range v.vips {
		if v.report.Checked++; !v.here[vip] {
			v.differs("address "+vip.String()+where, proxier.DifferenceMissing, "", "", name)
		}
	}
	draining := map[netip.Addr]bool{}
	for key, have := range v.have {
		if drains(key, have) {
			draining[key.VIP] = true
		}
	}
	for addr := range v.here {
		if _, wanted := v.vips[addr]; !wanted && !draining[addr] {
			v.differs("address "+addr.String()+where, proxier.DifferenceUnexpected, "", "", changetracker.ServicePortName{})
		}
	}
}

// String is the scheduler with what belongs to it.
func (s settings) String() string {
	text := "scheduler " + s.scheduler
	if s.flags != 0 {
		text += fmt.Sprintf(", flags %#x", s.flags)
	}
	if s.timeout != 0 {
		text += fmt.Sprintf(", timeout %v", s.timeout)
	}
	if s.forward != ForwardMasquerade {
		text += fmt.Sprintf(", forwarding %v", s.forward)
	}
	return text
}
