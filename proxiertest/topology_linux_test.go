package proxiertest_test

import (
	"net/netip"
	"testing"

	"go.uber.org/goleak"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxiertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestEveryPodAnswersEveryHostWithoutAnyRule(t *testing.T) {
	world := proxiertest.NewTopology(t)
	pods := append(append([]*proxiertest.Host{}, world.LocalPods...), world.RemotePods...)
	for _, from := range append([]*proxiertest.Host{world.Node, world.Client, world.Router}, pods...) {
		for _, to := range pods {
			for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
				for _, network := range []string{"tcp", "udp"} {
					target := netip.AddrPortFrom(to.Addr(family), 8080)
					got, err := from.Ask(t.Context(), network, target, proxiertest.AskOptions{})
					if err != nil || got.Server != to.Name || got.Local != target {
						t.Errorf("%s asks %s over %s at %s: %+v, %v", from.Name, to.Name, network, target, got, err)
					}
				}
			}
		}
	}
}

func TestTheCrowdedPodAnswersOnItsWholeRange(t *testing.T) {
	world := proxiertest.NewTopology(t)
	for _, target := range []string{"10.244.64.1:8080", "10.244.79.254:8080", "[fd00:10:244:64::abc]:8080"} {
		for _, network := range []string{"tcp", "udp"} {
			got, err := world.Client.Ask(t.Context(), network, netip.MustParseAddrPort(target), proxiertest.AskOptions{})
			if err != nil || got.Server != "pod-2" || got.Local.String() != target {
				t.Errorf("client asks %s over %s: %+v, %v, want pod-2 to answer from there", target, network, got, err)
			}
		}
	}
}
