//go:build vm

package localhost_test

import (
	"testing"

	"github.com/serviceplane/serviceplane/ipvs"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

func TestPacketsWithIPVS(t *testing.T) {
	features := proxiertest.Features{
		LocalPolicyBindsAll: true, AffinityPerFrontend: true, AffinityOutlivesTimeout: true, VIPsAreLocal: true,
		LocalhostSockets: true, Select: nodePortsOnly,
	}
	proxiertest.Conformance(t, features, func(config proxier.Config, deps proxier.Deps) (proxier.Provider, error) {
		return ipvs.New(ipvs.Config{Config: config, SetSysctls: true}, wrapping(config, deps))
	})
}
