//go:build vm

package ipvs_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
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

// TestAFlowtableIsACondition: connections through IPVS hang in a flowtable, and Status names it while it is there.
func TestAFlowtableIsACondition(t *testing.T) {
	w := proxiertest.NewTopology(t)
	netnstest.Offload(t, w.Node.NetNS())
	p, err := ipvs.New(ipvs.Config{Config: w.Config(), SetSysctls: true}, proxier.Deps{})
	netnstest.Check(t, err)
	proxiertest.Run(t, p)
	named := func() bool {
		return slices.ContainsFunc(p.Status().Conditions, func(c proxier.Condition) bool {
			return c.Type == proxier.ConditionForwarding && strings.HasPrefix(c.Message, "flowtable f of table foreign forwards")
		})
	}
	poll.Until(t, "the condition", named)
	p.OnServiceAdd(proxiertest.Service("default", "web", proxiertest.ClusterIPs("10.96.0.10"), proxiertest.Port("web", v1.ProtocolTCP, 80)))
	p.OnEndpointSliceAdd(proxiertest.Slice("default", "web", discovery.AddressTypeIPv4, proxiertest.SlicePort("web", v1.ProtocolTCP, 8080),
		proxiertest.Endpoint(w.LocalPods[0].Addr(v1.IPv4Protocol).String())))
	netnstest.Check(t, proxiertest.Sync(t.Context(), p))
	flow, err := w.LocalPods[1].Open(t.Context(), "tcp", netip.MustParseAddrPort("10.96.0.10:80"), proxiertest.AskOptions{Timeout: time.Second})
	netnstest.Check(t, err)
	_, err = flow.Ask(t.Context())
	if _, again := flow.Ask(t.Context()); err == nil && again == nil {
		t.Error("it answers twice: the flowtable does no harm any more, so the condition is wrong")
	}
	netnstest.Check(t, flow.Close())
	netnstest.Run(t, w.Node, "nft", "delete table inet foreign")
	poll.Until(t, "no condition", func() bool { return !named() })
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
