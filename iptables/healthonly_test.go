package iptables

import (
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// TestHealthChecksOnly programs one jump and its tree, in chains that an engine with the same
// Names but all rules does not own, and the reverse.
func TestHealthChecksOnly(t *testing.T) {
	for _, names := range []proxier.Names{proxier.DefaultNames(), proxier.KubeProxyNames()} {
		only, whole := Config{Config: proxier.Config{Names: names}, HealthChecksOnly: true}, Config{Config: proxier.Config{Names: names}}
		m := newModel(&only, v1.IPv4Protocol, desired.Globals{})
		name := changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "test", Name: "web"}, Protocol: v1.ProtocolTCP}
		s := &desired.Service{Name: name, Protocol: desired.TCP, Port: &changetracker.ServicePort{HealthCheckNodePort: 31999}}
		for range 2 { // the second time changes nothing
			m.set(name, m.planPort(s))
		}
		all := m.allChains()
		rules := 0
		for chain, of := range all[tableFilter] {
			rules += len(of)
			if !only.chains().owns(chain) || whole.chains().owns(chain) {
				t.Errorf("chain %s: owned by itself %v, by the whole engine %v; want true, false", chain, only.chains().owns(chain), whole.chains().owns(chain))
			}
		}
		if len(all[tableNAT]) != 0 || rules == 0 {
			t.Errorf("%d chains of nat and %d rules, want none and some", len(all[tableNAT]), rules)
		}
		jumps := m.jumps()[tableFilter]
		if len(m.jumps()) != 1 || len(jumps) != 1 || jumps[0].chain != "INPUT" || !slices.Contains([]string{"SPL-IPVS-HEALTH", "KUBE-IPVS-HEALTH"}, jumps[0].to) {
			t.Errorf("jumps %+v, want one from INPUT", jumps)
		}
		for _, chain := range []string{whole.chains().services(), whole.chains().health(), whole.chains().nodePorts()} {
			if only.chains().owns(chain) {
				t.Errorf("chain %s of the whole engine is owned", chain)
			}
		}
		m.set(name, nil)
		for chain, of := range m.allChains()[tableFilter] {
			if len(of) > 0 {
				t.Errorf("chain %s has %v without a health check node port", chain, of)
			}
		}
	}
}
