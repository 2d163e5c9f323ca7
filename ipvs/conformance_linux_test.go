//go:build vm

package ipvs_test

import (
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/ipvs"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

func deviations() proxiertest.Features {
	return proxiertest.Features{LocalPolicyBindsAll: true, AffinityPerFrontend: true, AffinityOutlivesTimeout: true, VIPsAreLocal: true}
}

func provider(config proxier.Config, deps proxier.Deps) (proxier.Provider, error) {
	// A client is remembered for as long as IPVS remembers one of its flows, so PKT-60
	// needs a short memory.
	return ipvs.New(ipvs.Config{Config: config, SetSysctls: true, UDPTimeout: time.Second}, deps)
}

func TestPackets(t *testing.T) {
	proxiertest.Conformance(t, deviations(), provider)
}

func TestExplainAgreesWithPackets(t *testing.T) {
	proxiertest.Explanations(t, 1024, 0, provider)
}
