package localhost_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/userspace"
	"github.com/serviceplane/serviceplane/userspace/localhost"
)

// wrapping returns deps that add sockets at localhost to an engine.
func wrapping(config proxier.Config, deps proxier.Deps) proxier.Deps {
	deps.Wrap = localhost.Wrap(userspace.Config{Config: config}, deps)
	return deps
}

func withNFTables(config proxier.Config, deps proxier.Deps) (proxier.Provider, error) {
	return nftables.New(nftables.Config{Config: config}, wrapping(config, deps))
}

// nodePortsOnly selects the scenarios about node ports: the others do not reach a socket.
func nodePortsOnly(name string) bool {
	rule, _, _ := strings.Cut(name, "/")
	return rule == "PKT-30" || rule == "PKT-31" || rule == "PKT-32" || rule == "PKT-35"
}

func TestPacketsWithNFTables(t *testing.T) {
	proxiertest.Conformance(t, proxiertest.Features{LocalhostSockets: true, Select: nodePortsOnly}, withNFTables)
}

// Node ports at localhost work beside iptables, without route_localnet.
func TestPacketsWithIPTables(t *testing.T) {
	features := proxiertest.Features{ServiceIPsPass: true, LocalhostSockets: true, Select: nodePortsOnly}
	proxiertest.Conformance(t, features, func(config proxier.Config, deps proxier.Deps) (proxier.Provider, error) {
		return iptables.New(iptables.Config{Config: config}, wrapping(config, deps))
	})
}

// TestExplainAgreesWithPackets accepts node ports at localhost in every setup.
func TestExplainAgreesWithPackets(t *testing.T) {
	proxiertest.Explanations(t, chance.Few(512, 1024), 0, func(config proxier.Config, deps proxier.Deps) (proxier.Provider, error) {
		if ports := &config.NodePorts; !ports.Primary && len(ports.Addresses) == 0 {
			ports.Addresses = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}
		}
		config.NodePorts.Localhost = true
		return withNFTables(config, deps)
	})
}
