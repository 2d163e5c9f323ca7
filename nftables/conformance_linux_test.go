package nftables_test

import (
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func provider(config proxier.Config, deps proxier.Deps) (proxier.Provider, error) {
	return nftables.New(nftables.Config{Config: config}, deps)
}

// TestPackets sends real packets for the table of scenarios. This engine is the reference:
// its only difference is that rules hand values on in the priority of a packet.
func TestPackets(t *testing.T) {
	proxiertest.Conformance(t, proxiertest.Features{FirstPriorityLost: true, ClientLimits: true}, provider)
}

// TestClosedLoadBalancerIPs does both with CloseLoadBalancerIPs: what differs, and random packets.
func TestClosedLoadBalancerIPs(t *testing.T) {
	closed := func(config proxier.Config, deps proxier.Deps) (proxier.Provider, error) {
		return nftables.New(nftables.Config{Config: config, CloseLoadBalancerIPs: true}, deps)
	}
	proxiertest.Conformance(t, proxiertest.Features{ClosedLoadBalancerIPs: true, Select: func(name string) bool {
		return strings.HasPrefix(name, "PKT-10") || name == "PKT-50"
	}}, closed)
	proxiertest.Explanations(t, chance.Few(256, 1024), 0, closed)
}

// TestExplainAgreesWithPackets sends random packets among random Services.
func TestExplainAgreesWithPackets(t *testing.T) {
	proxiertest.Explanations(t, chance.Few(512, 2048), 0, provider)
}

// TestTraceAgreesWithExplain follows random packets through the rules.
func TestTraceAgreesWithExplain(t *testing.T) {
	proxiertest.Traces(t, chance.Few(100, 200), 0, proxier.DefaultNames(), provider)
}

// Connections are counted exactly.
func TestCounts(t *testing.T) {
	proxiertest.ConnectionCounts(t, provider)
}

// Connections above a client limit are counted exactly.
func TestRefusedCounts(t *testing.T) { proxiertest.RefusedCounts(t, provider) }

// Packets and bytes are counted exactly.
func TestTraffic(t *testing.T) {
	proxiertest.TrafficCounts(t, provider)
}
