package ipvs

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/desired"
)

// Plan is for proxier.Abilities.
func (e *engine) Plan(update desired.Update) (string, error) {
	p := planner{config: &e.config, nodeAddrs: nodePortAddrs(update.Globals.NodeAddresses, update.Globals.NodePortAddresses)}
	all := map[serverKey]*virtual{}
	for s := range update.Services() {
		maps.Copy(all, p.virtuals(s))
	}
	maps.DeleteFunc(all, func(_ serverKey, v *virtual) bool { return len(v.reals) == 0 })
	front, err := e.rules.Plan(update, func(vip netip.Addr) bool { return !slices.Contains(update.Globals.NodeAddresses, vip) })
	return text(all) + "\n" + front, err
}
