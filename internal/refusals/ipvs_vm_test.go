//go:build vm

package refusals

import (
	"maps"
	"slices"
	"testing"

	"github.com/serviceplane/serviceplane/ipvs"
	"github.com/serviceplane/serviceplane/proxier"
)

func newIPVS() engine {
	return engine{name: "ipvs", ownsVIPs: true, clashes: true, create: func(c proxier.Config) (*proxier.Proxier, error) {
		return ipvs.New(ipvs.Config{Config: c, SetSysctls: true}, proxier.Deps{})
	}}
}

func TestRefusalsOfIPVS(t *testing.T) {
	for _, s := range settings() {
		t.Run(s.name, func(t *testing.T) { refuse(t, newIPVS(), s) })
	}
}

func TestFlowsOfAServiceThatIsDeletedWhileNoIPVSRuns(t *testing.T) { forgotten(t, newIPVS()) }

func TestAConnectionThatBeganBeforeItsServiceOfIPVS(t *testing.T) { early(t, newIPVS()) }

func TestNothingGetsThroughDuringAChangeOfIPVS(t *testing.T) { change(t, newIPVS()) }

func TestTransitionsOfIPVSKeepServing(t *testing.T) {
	for _, name := range slices.Sorted(maps.Keys(transitions())) {
		t.Run(name, func(t *testing.T) { keepServing(t, newIPVS(), transitions()[name]) })
	}
}

func TestARestartOfIPVSServesThePortsOfBefore(t *testing.T) { restarted(t, newIPVS()) }
