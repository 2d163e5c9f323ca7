package coexistence

import (
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/userspace"
)

// engine is one way to program Services.
type engine struct {
	name string
	// iptables is the variant of iptables that other programs on the node use.
	iptables iptables.Variant
	create   func(config proxier.Config) (*proxier.Proxier, error)
	// damage deletes what Services need.
	damage string
	// ownTables means that no rule of the engine is in the tables of iptables.
	ownTables bool
	// sourceLost means that endpoints see an address of the node.
	sourceLost bool
	// next is the mode that the node changes to. It has other kernel objects, so that the
	// clean-up of this one leaves it alone.
	next string
}

const deleteIPTables = "for table in nat filter mangle raw; do for family in ip ip6; do nft delete table $family $table 2>/dev/null || true; done; done\n"

const deleteTables = "nft delete table ip kube-proxy\nnft delete table ip6 kube-proxy\n"

func engines() []engine {
	return []engine{
		{name: "nftables", iptables: iptables.VariantNFT, create: newNFTables, damage: deleteTables, ownTables: true, next: "iptables-nft"},
		{
			name: "iptables-nft", iptables: iptables.VariantNFT, create: newIPTables(iptables.VariantNFT), next: "nftables",
			damage: "iptables-nft -t nat -F KUBE-SERVICES\nip6tables-nft -t nat -F KUBE-SERVICES\n",
		},
		{
			name: "iptables-legacy", iptables: iptables.VariantLegacy, create: newIPTables(iptables.VariantLegacy), next: "nftables",
			damage: "iptables-legacy -t nat -F KUBE-SERVICES\nip6tables-legacy -t nat -F KUBE-SERVICES\n",
		},
		{name: "userspace", iptables: iptables.VariantNFT, create: newUserspace, damage: deleteTables, ownTables: true, sourceLost: true, next: "iptables-nft"},
	}
}

func engineNamed(name string) engine {
	for _, e := range engines() {
		if e.name == name {
			return e
		}
	}
	return engine{}
}

func newNFTables(config proxier.Config) (*proxier.Proxier, error) {
	return nftables.New(nftables.Config{Config: config}, proxier.Deps{})
}

func newIPTables(variant iptables.Variant) func(proxier.Config) (*proxier.Proxier, error) {
	return func(config proxier.Config) (*proxier.Proxier, error) {
		return iptables.New(iptables.Config{Config: config, Variant: variant}, proxier.Deps{})
	}
}

// newUserspace returns a proxy of sockets, with rules of nftables in front.
func newUserspace(config proxier.Config) (*proxier.Proxier, error) {
	deps := proxier.Deps{Conntrack: conntrack.New(conntrack.Options{NetNS: config.NetNS})}
	portals := func(family v1.IPFamily) (proxier.Engine, error) {
		return nftables.NewEngine(nftables.Config{Config: config}, family, deps)
	}
	return userspace.New(userspace.Config{Config: config, Portals: portals}, deps)
}

// never returns those outcomes that no setting changes: policies of pods cannot know the
// clients of a proxy of sockets, which are from the node for them.
func (e engine) never(all outcomes) outcomes {
	left := outcomes{}
	for what, names := range all {
		if e.sourceLost && slices.Equal(names, []string{ownPolicy().name}) {
			left[what] = names
		}
	}
	return left
}
