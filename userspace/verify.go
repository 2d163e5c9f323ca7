package userspace

import (
	"context"
	"fmt"
	"maps"
	"net/netip"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// Verify is for proxier.Abilities: it compares the open sockets with those that a new engine
// would open, and on Linux asks the kernel whether each still serves, since root can close sockets of
// others. It asks the engine of the portals too. SCTP, which is not proxied, is no difference.
func (e *Engine) Verify(ctx context.Context, update desired.Update) (report proxier.Verification, err error) {
	portals := desired.Update{Family: update.Family, Full: true, Globals: update.Globals}
	unknown := maps.Clone(e.services)
	err = e.eachPlanned(&update, func(want *desired.Service, listeners map[socketKey]policy) {
		delete(unknown, want.Name)
		s := e.services[want.Name]
		compareSockets(&report, want.Name, listeners, s)
		if s != nil && e.portals != nil {
			portals.Changes = append(portals.Changes, desired.ChangesTo(e.portalOf(s, want))...)
		}
	})
	if err != nil {
		return report, err
	}
	for name, s := range unknown {
		compareSockets(&report, name, nil, s)
	}
	if e.portals != nil && e.portals.Abilities().Verify != nil {
		inPortals, err := e.portals.Abilities().Verify(ctx, portals)
		report.Checked += inPortals.Checked
		report.Differences = append(report.Differences, inPortals.Differences...)
		if err != nil {
			return report, fmt.Errorf("portals: %w", err)
		}
	}
	return report, nil
}

// compareSockets compares the sockets of one service port; s may be nil.
func compareSockets(report *proxier.Verification, name changetracker.ServicePortName, want map[socketKey]policy, s *service) {
	var have map[socketKey]*socket
	if s != nil {
		have = s.sockets
	}
	differs := func(key socketKey, problem, text string) {
		report.Differences = append(report.Differences, proxier.Difference{
			Object: fmt.Sprintf("socket of role %v of %v at %v", key.role, name, placeText(key.addr)), Problem: problem, Have: text, Service: name,
		})
	}
	for key := range want {
		if report.Checked++; have[key] == nil {
			differs(key, proxier.DifferenceMissing, "")
		}
	}
	for key, socket := range have {
		_, wanted := want[key]
		switch {
		case !wanted:
			differs(key, proxier.DifferenceUnexpected, socket.site.Addr.String())
		case socket.isLost():
			differs(key, proxier.DifferenceMissing, "") // another program has closed it
		}
	}
}

// placeText is where a socket listens; port 0 means any proxy port.
func placeText(at netip.AddrPort) string {
	if at.Port() == 0 {
		return at.Addr().String() + ", any proxy port"
	}
	return at.String()
}
