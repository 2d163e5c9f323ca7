package coexistence

import (
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestAMarkOfCalicoMasqueradesEverything: with a bit of Calico's as masquerade mark, every
// packet that its policies accept is masqueraded. Its own bits and ours must differ.
func TestAMarkOfCalicoMasqueradesEverything(t *testing.T) {
	mustRoots(t)
	const accepts = 1 << 16
	for _, f := range corpus() {
		if f.name != "Calico, iptables" {
			continue
		}
		for _, e := range []engine{engineNamed("nftables"), engineNamed("iptables-nft")} {
			t.Run(e.name, func(t *testing.T) {
				t.Parallel()
				create := e.create
				e.create = func(config proxier.Config) (*proxier.Proxier, error) {
					config.Masquerade.Mark = accepts
					return create(config)
				}
				w := newWorld(t, f, e)
				w.start(e)
				pod := probes()[slices.IndexFunc(probes(), func(p probe) bool { return p.name == "pod" })]
				if got := w.outcome(t.Context(), pod, v1.IPv4Protocol, proxiertest.AskOptions{}); got != "source lost" {
					t.Errorf("a pod's connection to a ClusterIP, with Calico's mark: %s, want the source lost, as %s says", got, document)
				}
			})
		}
	}
}
