package ipvs

import (
	"context"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/proxier"
)

// withFlowtables adds to what others find of the surroundings that there is a flowtable, which forwards packets
// past IPVS. Its program decides which: it may take no connection of a Service.
func withFlowtables(netNS string, others func(context.Context, changetracker.Node) []proxier.Condition) func(context.Context, changetracker.Node) []proxier.Condition {
	return func(ctx context.Context, node changetracker.Node) (all []proxier.Condition) {
		if others != nil {
			all = others(ctx, node)
		}
		if flowtable := nft.FindFlowtable(ctx, netNS, func(uint32) bool { return true }); flowtable != "" {
			all = append(all, proxier.Condition{
				Type: proxier.ConditionForwarding, Since: time.Now(),
				Message: flowtable + " forwards packets that IPVS must translate: connections that it takes hang after their first answer; let it leave out endpoints, or use mode nftables",
			})
		}
		return all
	}
}
