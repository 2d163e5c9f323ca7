package userspace_test

import (
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/userspace"
)

func portals(config proxier.Config, deps proxier.Deps) (proxier.Provider, error) {
	deps.Conntrack = conntrack.New(conntrack.Options{NetNS: config.NetNS})
	return userspace.New(userspace.Config{
		Config: config, ShareNodePorts: true,
		Portals: func(family v1.IPFamily) (proxier.Engine, error) {
			return nftables.NewEngine(nftables.Config{Config: config}, family, deps)
		},
	}, deps)
}

// deviations are what a proxy of sockets cannot do.
func deviations() proxiertest.Features {
	return proxiertest.Features{SourceLost: true, NoSCTP: true}
}

func TestPackets(t *testing.T) {
	proxiertest.Conformance(t, deviations(), portals)
}

func TestExplainAgreesWithPackets(t *testing.T) {
	proxiertest.Explanations(t, 2048, 0, portals)
}
