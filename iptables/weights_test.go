package iptables

import (
	"math"
	"math/rand/v2"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

var (
	probability = regexp.MustCompile(`--probability (\S+)`)
	target      = regexp.MustCompile(`(?:--to-destination|-j) (\S+)$`)
)

// addShares adds up the probability to reach each endpoint from a chain.
func addShares(plan *portPlan, chain string, share float64, into map[netip.AddrPort]float64) {
	for _, r := range plan.chains[chain] {
		if strings.Contains(string(r), "--rcheck") {
			continue // clients with session affinity
		}
		own := share
		if p := probability.FindStringSubmatch(string(r)); p != nil {
			f, _ := strconv.ParseFloat(p[1], 64)
			own *= f
		}
		to := target.FindStringSubmatch(string(r))[1]
		if e, err := netip.ParseAddrPort(to); err == nil {
			into[e] += own
		} else {
			addShares(plan, to, own, into)
		}
		share -= own
	}
}

// Probabilities follow the weights, through groups, chains of endpoints and session affinity.
func TestProbabilitiesFollowWeights(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for _, names := range []proxier.Names{{}, proxier.KubeProxyNames()} {
		for _, n := range []int{1, 2, 16, 17, 300} {
			s := &desired.Service{Name: changetracker.ServicePortName{Port: "http", Protocol: v1.ProtocolTCP}, Protocol: desired.TCP, Port: &changetracker.ServicePort{}}
			total := 0.0
			for i := range n {
				s.Cluster = s.Cluster.With(netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, byte(i >> 8), byte(i)}), 80))
				s.ClusterWeights = append(s.ClusterWeights, uint16(1+random.IntN(1<<(1+random.IntN(16))-1)))
				total += float64(s.ClusterWeights[i])
			}
			s.Frontends = []desired.Frontend{{Kind: desired.ClusterIP, VIP: netip.MustParseAddr("10.96.0.1"), Port: 80, Scope: desired.ScopeCluster, Action: desired.Forward, Masquerade: desired.MasqueradeNone}}
			m := newModel(pureConfig(names), v1.IPv4Protocol, pureGlobals())
			plan, got := m.planPort(s), map[netip.AddrPort]float64{}
			addShares(plan, m.names.cluster(identity(s.Name)), 1, got)
			for i, e := range s.Cluster.Slice() {
				if want := float64(s.ClusterWeights[i]) / total; math.Abs(got[e]-want) > 1e-6 {
					t.Errorf("%d endpoints: weight %d of %.0f has probability %.8f, want %.8f", n, s.ClusterWeights[i], total, got[e], want)
				}
			}
		}
	}
}
