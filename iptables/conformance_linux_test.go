package iptables_test

import (
	"testing"

	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// deviations are the differences from the reference: packets that iptables does not refuse,
// and those that it accepts on request.
func deviations() proxiertest.Features {
	return proxiertest.Features{ServiceIPsPass: true, LoopbackNodePorts: true, NoHash: true}
}

// provider uses one variant, and default names or kube-proxy's; with the latter each endpoint
// has a chain.
func provider(variant iptables.Variant, names proxier.Names) proxiertest.Factory {
	return func(config proxier.Config, deps proxier.Deps) (proxier.Provider, error) {
		config.Names = names
		return iptables.New(iptables.Config{Config: config, Variant: variant, RouteLocalnet: true}, deps)
	}
}

func TestPacketsWithNFT(t *testing.T) {
	t.Parallel()
	proxiertest.Conformance(t, deviations(), provider(iptables.VariantNFT, proxier.KubeProxyNames()))
}

func TestPacketsWithLegacy(t *testing.T) {
	t.Parallel()
	proxiertest.Conformance(t, deviations(), provider(iptables.VariantLegacy, proxier.DefaultNames()))
}

// Counts are right with rules that translate in the chain of the service port, and in chains of endpoints.
func TestCounts(t *testing.T) {
	t.Parallel()
	for _, variant := range []iptables.Variant{iptables.VariantNFT, iptables.VariantLegacy} {
		for _, names := range []proxier.Names{proxier.DefaultNames(), proxier.KubeProxyNames()} {
			t.Run(string(variant)+"/"+names.Instance, func(t *testing.T) {
				t.Parallel()
				proxiertest.ConnectionCounts(t, provider(variant, names))
			})
		}
	}
}

// Packets and bytes are counted exactly.
func TestTraffic(t *testing.T) {
	t.Parallel()
	for _, variant := range []iptables.Variant{iptables.VariantNFT, iptables.VariantLegacy} {
		t.Run(string(variant), func(t *testing.T) {
			t.Parallel()
			proxiertest.TrafficCounts(t, provider(variant, proxier.DefaultNames()))
		})
	}
}

func TestExplainAgreesWithPacketsOfNFT(t *testing.T) {
	t.Parallel()
	proxiertest.Explanations(t, chance.Few(512, 2048), 0, provider(iptables.VariantNFT, proxier.DefaultNames()))
}

func TestExplainAgreesWithPacketsOfLegacy(t *testing.T) {
	t.Parallel()
	proxiertest.Explanations(t, chance.Few(512, 2048), 0, provider(iptables.VariantLegacy, proxier.KubeProxyNames()))
}

func TestTraceAgreesWithExplainOfNFT(t *testing.T) {
	t.Parallel()
	proxiertest.Traces(t, chance.Few(100, 200), 0, proxier.DefaultNames(), provider(iptables.VariantNFT, proxier.DefaultNames()))
}

// The trace agrees with Explain in the legacy variant, although the rules that stop packets cannot be seen.
func TestTraceAgreesWithExplainOfLegacy(t *testing.T) {
	t.Parallel()
	proxiertest.Traces(t, 80, 0, proxier.DefaultNames(), provider(iptables.VariantLegacy, proxier.DefaultNames()))
}
