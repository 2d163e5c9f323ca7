//go:build vm

package ipvs_test

import (
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/ipvs"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// affinityTimeout is the scenario that waits until session affinity ends. With IPVS that is
// when the kernel deletes the client's last flow, so it needs a short UDPTimeout. Other
// scenarios must not have one: on a busy machine a reply would come after the flow.
const affinityTimeout = "PKT-60/timeout"

func deviations() proxiertest.Features {
	return proxiertest.Features{
		LocalPolicyBindsAll: true, AffinityPerFrontend: true, AffinityOutlivesTimeout: true, VIPsAreLocal: true, FirstPriorityLost: true,
		LeastConnections: true, HashFollowsHistory: true,
	}
}

func provider(udpTimeout time.Duration) proxiertest.Factory {
	return func(config proxier.Config, deps proxier.Deps) (proxier.Provider, error) {
		return ipvs.New(ipvs.Config{Config: config, SetSysctls: true, UDPTimeout: udpTimeout}, deps)
	}
}

func TestPackets(t *testing.T) {
	features := deviations()
	features.Select = func(name string) bool { return name != affinityTimeout && name != "PKT-09/first_packet" } // IPVS itself refuses, by ICMP
	proxiertest.Conformance(t, features, provider(0))
}

// TestPacketsBesideAFlowtable: another program has all established connections forwarded without
// rules.
func TestPacketsBesideAFlowtable(t *testing.T) {
	features := deviations()
	features.Prepare = func(node string, _ []string) { netnstest.Offload(t, node) }
	features.Select = func(name string) bool { return name != affinityTimeout && name != "PKT-09/first_packet" }
	proxiertest.Conformance(t, features, provider(0))
}

func TestAffinityEndsAfterItsTimeout(t *testing.T) {
	features := deviations()
	features.Select = func(name string) bool { return name == affinityTimeout }
	proxiertest.Conformance(t, features, provider(time.Second))
}

func TestExplainAgreesWithPackets(t *testing.T) {
	proxiertest.Explanations(t, chance.Few(512, 1024), 0, provider(0))
}

// The trace agrees with Explain, although IPVS translates the packets, and no rule does.
func TestTraceAgreesWithExplain(t *testing.T) {
	proxiertest.Traces(t, 80, 0, proxier.DefaultNames(), provider(0))
}

// Connections are counted exactly.
func TestCounts(t *testing.T) {
	proxiertest.ConnectionCounts(t, provider(0))
}

// Packets and bytes are counted exactly.
func TestTraffic(t *testing.T) {
	proxiertest.TrafficCounts(t, provider(0))
}
