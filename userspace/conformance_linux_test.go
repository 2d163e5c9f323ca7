package userspace_test

import (
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/userspace"
)

// withNFTables returns a Provider with portals of nftables.
func withNFTables(config proxier.Config, deps proxier.Deps) (proxier.Provider, error) {
	return withPortals(config, deps, func(family v1.IPFamily) (proxier.Engine, error) {
		return nftables.NewEngine(nftables.Config{Config: config}, family, deps)
	})
}

// withIPTables returns a Provider with portals of iptables, in chains with the names of
// kube-proxy's userspace mode.
func withIPTables(config proxier.Config, deps proxier.Deps) (proxier.Provider, error) {
	config.Names = proxier.KubeProxyNames()
	return withPortals(config, deps, func(family v1.IPFamily) (proxier.Engine, error) {
		return iptables.NewEngine(iptables.Config{Config: config, Variant: iptables.VariantNFT, RouteLocalnet: true, Portals: true}, family, deps)
	})
}

func withPortals(config proxier.Config, deps proxier.Deps, portals func(v1.IPFamily) (proxier.Engine, error)) (proxier.Provider, error) {
	deps.Conntrack = conntrack.New(conntrack.Options{NetNS: config.NetNS})
	return userspace.New(userspace.Config{Config: config, ShareNodePorts: true, Portals: portals}, deps)
}

// deviations are the features that a proxy of sockets cannot have.
func deviations() proxiertest.Features {
	return proxiertest.Features{SourceLost: true, NoSCTP: true, LeastConnections: true}
}

func TestPacketsWithNFTables(t *testing.T) {
	t.Parallel()
	proxiertest.Conformance(t, deviations(), withNFTables)
}

func TestPacketsWithIPTables(t *testing.T) {
	t.Parallel()
	features := deviations()
	features.ServiceIPsPass, features.LoopbackNodePorts = true, true
	proxiertest.Conformance(t, features, withIPTables)
}

func TestExplainAgreesWithPackets(t *testing.T) {
	t.Parallel()
	proxiertest.Explanations(t, chance.Few(512, 2048), 0, withNFTables)
}

// Connections are counted exactly.
func TestCounts(t *testing.T) {
	t.Parallel()
	proxiertest.ConnectionCounts(t, withNFTables)
}
