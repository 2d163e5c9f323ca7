package proxier_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

const (
	nodeIP, otherNodeIP = "192.0.2.10", "192.0.2.11"
	sharedVIP           = "203.0.113.1"
	claimedNodePort     = 30080
)

// claimed is a Proxier in a bubble, with its engine and its last report.
type claimed struct {
	*proxier.Proxier

	engine *proxiertest.RecordingEngine
	report proxier.SyncReport // may be read after sync
}

func (c *claimed) ObserveSync(r proxier.SyncReport) { c.report = r }

func claimedNode(addrs ...string) changetracker.Node {
	n := changetracker.Node{Name: "node"}
	for _, a := range addrs {
		n.Addresses = append(n.Addresses, netip.MustParseAddr(a))
	}
	return n
}

// newClaimed returns one that runs with these Services.
func newClaimed(ctx context.Context, t *testing.T, n changetracker.Node, services ...*v1.Service) *claimed {
	t.Helper()
	c := &claimed{engine: &proxiertest.RecordingEngine{}}
	config := proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}, Node: n, Runner: runner.Options{MinInterval: runner.Unlimited}}
	var err error
	if c.Proxier, err = proxier.New(config, proxier.Deps{Observer: c}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: c.engine}); err != nil {
		t.Fatal(err)
	}
	go func() { _ = c.Run(ctx) }()
	for _, s := range services {
		c.OnServiceAdd(s)
	}
	c.OnServiceSynced()
	c.OnEndpointSlicesSynced()
	c.sync(t)
	return c
}

// sync returns when the Proxier rests: the request that Sync makes can cause another sync
// after the one that answers it.
func (c *claimed) sync(t *testing.T) {
	t.Helper()
	if err := c.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	synctest.Wait()
}

// owners returns the service ports that the engine has programmed, by frontend.
func (c *claimed) owners() map[string]string {
	owners := map[string]string{}
	for name, s := range c.engine.Services() {
		for i := range s.Frontends {
			key := s.Key(&s.Frontends[i]).String()
			owners[key] += name.Namespace + "/" + name.Name + " "
		}
	}
	return owners
}

func (c *claimed) problems() (texts []string) {
	for _, p := range c.Status().Problems {
		texts = append(texts, p.Object+": "+p.Value)
	}
	return texts
}

// mayClaim returns a Service with an age in seconds, 0 for unknown.
func mayClaim(namespace, name string, age int64, port int32, opts ...proxiertest.ServiceOption) *v1.Service {
	s := proxiertest.Service(namespace, name, append([]proxiertest.ServiceOption{
		proxiertest.ClusterIPs(clusterIPOf(namespace + name)), proxiertest.Port("", v1.ProtocolTCP, port),
	}, opts...)...)
	if age > 0 {
		s.CreationTimestamp = metav1.Unix(1e9-age, 0)
	}
	return s
}

func clusterIPOf(name string) string {
	var sum byte
	for _, c := range []byte(name) {
		sum = sum*31 + c
	}
	return fmt.Sprintf("10.96.%d.%d", len(name), sum)
}

func atNodePort(s *v1.Service) {
	s.Spec.Type, s.Spec.Ports[0].NodePort = v1.ServiceTypeNodePort, claimedNodePort
}

// TestTheOlderServiceHasTheVIP tries all ways to take the traffic of another Service, in both
// orders, and then deletes the winner.
func TestTheOlderServiceHasTheVIP(t *testing.T) {
	shared, atNode := proxiertest.ExternalIPs(sharedVIP), proxiertest.ExternalIPs(nodeIP)
	balancer := proxiertest.LoadBalancer(sharedVIP)
	sharedKey, nodePortKey, nodeKey := sharedVIP+":80/TCP", "node port 30080/TCP", nodeIP+":30080/TCP"
	for name, test := range map[string]struct {
		winner, loser *v1.Service
		key           string // of the winner's frontend
		disputed      string // the key of the loser's frontend, if it differs
		partly        bool   // the loser keeps its frontend at other addresses
	}{
		"external IP": {
			winner: mayClaim("prod", "victim", 9, 80, shared), loser: mayClaim("aaa", "evil", 1, 80, shared), key: sharedKey,
		},
		"same age, other UID": {
			winner: mayClaim("prod", "victim", 9, 80, shared, withUID("a")), loser: mayClaim("aaa", "evil", 9, 80, shared, withUID("b")), key: sharedKey,
		},
		"unknown age": {
			winner: mayClaim("prod", "victim", 1, 80, shared), loser: mayClaim("aaa", "evil", 0, 80, shared), key: sharedKey,
		},
		"load balancer": {
			winner: mayClaim("prod", "victim", 9, 80, balancer), loser: mayClaim("aaa", "evil", 1, 80, balancer), key: sharedKey,
		},
		"external IP is another Service's load balancer IP": {
			winner: mayClaim("prod", "victim", 1, 80, balancer), loser: mayClaim("aaa", "evil", 9, 80, shared), key: sharedKey,
		},
		"external IP is another Service's cluster IP": {
			winner: mayClaim("prod", "victim", 1, 80), loser: mayClaim("aaa", "evil", 9, 80, proxiertest.ExternalIPs(clusterIPOf("prodvictim"))),
			key: clusterIPOf("prodvictim") + ":80/TCP",
		},
		"external IP over a node port": {
			winner: mayClaim("prod", "victim", 9, 80, atNodePort), loser: mayClaim("aaa", "evil", 1, claimedNodePort, atNode),
			key: nodePortKey, disputed: nodeKey,
		},
		"load balancer over a node port": {
			winner: mayClaim("prod", "victim", 9, 80, atNodePort),
			loser:  mayClaim("aaa", "evil", 1, claimedNodePort, proxiertest.LoadBalancer(nodeIP)),
			key:    nodePortKey, disputed: nodeKey,
		},
		"node port under an external IP": {
			winner: mayClaim("prod", "victim", 9, claimedNodePort, atNode), loser: mayClaim("aaa", "evil", 1, 80, atNodePort),
			key: nodeKey, partly: true,
		},
	} {
		for order, both := range map[string][]*v1.Service{"winner first": {test.winner, test.loser}, "loser first": {test.loser, test.winner}} {
			t.Run(name+"/"+order, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					ctx, cancel := context.WithCancel(t.Context())
					defer synctest.Wait()
					defer cancel()
					c := newClaimed(ctx, t, claimedNode(nodeIP), both[0])
					c.OnServiceAdd(both[1])
					c.sync(t)
					winner, loser := test.winner.Namespace+"/"+test.winner.Name, test.loser.Namespace+"/"+test.loser.Name
					disputed := test.key
					if test.disputed != "" {
						disputed = test.disputed
						if got := c.owners()[disputed]; got != "" {
							t.Errorf("%s has %s, want no owner", got, disputed)
						}
					}
					if got := c.owners()[test.key]; got != winner+" " {
						t.Errorf("owners of %s are %q, want %s alone", test.key, got, winner)
					}
					if _, kept := c.owners()[nodePortKey]; test.partly && !kept {
						t.Error("the loser has lost its node port at all addresses")
					}
					if got, want := c.problems(), []string{"Service " + loser + ": " + disputed + " belongs to " + winner}; !slices.Equal(got, want) {
						t.Errorf("problems = %q, want %q", got, want)
					}
					if n := c.report.Problems[changetracker.ReasonDuplicate]; n != 1 {
						t.Errorf("%d problems are reported to the observer, want 1", n)
					}
					c.OnServiceDelete(test.winner)
					c.sync(t)
					if got := c.owners()[disputed]; got != loser+" " && !test.partly {
						t.Errorf("owners of %s are %q after %s was deleted, want %s", disputed, got, winner, loser)
					}
					if got := c.problems(); len(got) > 0 || len(c.report.Problems) > 0 {
						t.Errorf("problems = %q after %s was deleted, %v reported, want none", got, winner, c.report.Problems)
					}
				})
			})
		}
	}
}

func withUID(uid types.UID) proxiertest.ServiceOption {
	return func(s *v1.Service) { s.UID = uid }
}

// TestClaimsAreSettledByWhatIsThere compares a Proxier with a random history to one that is
// started with the present Services, and Explain to what the engine has programmed. The engine of
// the first refuses some service ports for a time.
func TestClaimsAreSettledByWhatIsThere(t *testing.T) {
	for seed := range uint64(200) {
		synctest.Test(t, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 1))
			ctx, cancel := context.WithCancel(t.Context())
			defer synctest.Wait()
			defer cancel()
			node := claimedNode(nodeIP)
			c := newClaimed(ctx, t, node)
			services := map[string]*v1.Service{}
			restart := func() *claimed { return newClaimed(ctx, t, node, slices.Collect(maps.Values(services))...) }
			for range 30 {
				name := string(rune('a' + r.IntN(5)))
				c.engine.Refuse(claimName(name), []error{nil, nil, errors.New("not now")}[r.IntN(3)])
				before := services[name]
				delete(services, name)
				switch {
				case before != nil && r.IntN(3) == 0:
					c.OnServiceDelete(before)
				case r.IntN(10) == 0:
					node = claimedNode([][]string{{}, {nodeIP}, {otherNodeIP}, {nodeIP, otherNodeIP}}[r.IntN(4)]...)
					c.OnNodeChange(node)
					fallthrough
				default:
					services[name] = randomClaim(r, name)
					c.OnServiceUpdate(before, services[name])
				}
				if r.IntN(3) == 0 {
					continue // two changes in a sync
				}
				c.sync(t)
				if got, want := c.problems(), restart().problems(); !slices.Equal(got, want) {
					t.Errorf("seed %d: problems %q, after a restart %q", seed, got, want)
				}
			}
			for name := range services {
				c.engine.Refuse(claimName(name), nil)
			}
			c.sync(t)
			restarted := restart()
			if got, want := c.owners(), restarted.owners(); !maps.Equal(got, want) {
				t.Errorf("seed %d: owners %v, after a restart %v", seed, got, want)
			}
			if got, want := c.problems(), restarted.problems(); !slices.Equal(got, want) || c.report.Problems[changetracker.ReasonDuplicate] != len(got) {
				t.Errorf("seed %d: problems %q, reported %v, after a restart %q", seed, got, c.report.Problems, want)
			}
			c.explainsItsOwners(ctx, t)
			time.Sleep(2 * time.Hour) // past a full sync
			if got, want := c.owners(), restarted.owners(); !maps.Equal(got, want) {
				t.Errorf("seed %d: owners %v after a full sync, want %v", seed, got, want)
			}
		})
	}
}

func claimName(name string) changetracker.ServicePortName {
	return changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "test", Name: name}, Protocol: v1.ProtocolTCP}
}

func randomClaim(r *rand.Rand, name string) *v1.Service {
	opts := []proxiertest.ServiceOption{withUID(types.UID([]string{"", "u", "v"}[r.IntN(3)]))}
	for _, addr := range []string{nodeIP, otherNodeIP, sharedVIP} {
		switch r.IntN(6) {
		case 0:
			opts = append(opts, proxiertest.LoadBalancer(addr))
		case 1, 2:
			opts = append(opts, proxiertest.ExternalIPs(addr))
		}
	}
	if r.IntN(2) == 0 {
		opts = append(opts, atNodePort)
	}
	return mayClaim("test", name, int64(r.IntN(3)), []int32{80, claimedNodePort}[r.IntN(2)], opts...)
}

// explainsItsOwners calls Explain for packets to every address.
func (c *claimed) explainsItsOwners(ctx context.Context, t *testing.T) {
	t.Helper()
	for _, addr := range []string{nodeIP, otherNodeIP, sharedVIP} {
		for _, port := range []uint16{80, claimedNodePort} {
			to := netip.AddrPortFrom(netip.MustParseAddr(addr), port)
			e, err := c.Explain(ctx, desired.Packet{
				Protocol: desired.TCP, Source: netip.MustParseAddr("198.51.100.2"), Destination: to, Origin: desired.FromOutside,
			})
			if err != nil {
				t.Fatal(err)
			}
			want := c.owners()[desired.Key{VIP: to.Addr(), Protocol: desired.TCP, Port: port}.String()]
			if isNode := slices.Contains(c.Status().Node.Addresses, to.Addr()); want == "" && isNode {
				want = c.owners()[desired.Key{Protocol: desired.TCP, Port: port}.String()]
			}
			got := ""
			if e.Service != nil {
				got = e.Service.Namespace + "/" + e.Service.Name + " "
			}
			if got != want {
				t.Errorf("Explain of %v: owner %q, programmed for %q: %q", to, got, want, e.Reasons)
			}
		}
	}
}
