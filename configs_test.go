package serviceplane_test

import (
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/ipvs"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/runner"
	"github.com/serviceplane/serviceplane/userspace"
)

// TestZeroConfigsAreValid: the zero value of every Config is valid, alone
// and beside a field that is set.
func TestZeroConfigsAreValid(t *testing.T) {
	t.Parallel()
	some := proxier.Config{FullSyncPeriod: time.Minute}
	for name, config := range map[string]interface{ Validate() error }{
		"proxier":           proxier.Config{},
		"proxier, some":     some,
		"nftables":          nftables.Config{},
		"nftables, some":    nftables.Config{Config: some},
		"iptables":          iptables.Config{},
		"iptables, some":    iptables.Config{Config: some, Variant: iptables.VariantNFT},
		"ipvs":              ipvs.Config{},
		"ipvs, some":        ipvs.Config{Config: some, UDPTimeout: time.Second},
		"userspace":         userspace.Config{},
		"userspace, some":   userspace.Config{Config: some, ShareNodePorts: true},
		"runner":            runner.Options{},
		"runner, some":      runner.Options{Burst: 1},
		"conntrack sysctls": conntrack.SysctlOptions{},
	} {
		if err := config.Validate(); err != nil {
			t.Errorf("%s: Validate() = %v, want nil", name, err)
		}
	}
}
