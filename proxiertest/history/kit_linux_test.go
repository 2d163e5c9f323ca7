package history_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/node/nodedeps"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/proxiertest/history"
)

var families = []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} // read-only

// scratchPlane is a network namespace for histories.
type scratchPlane struct {
	tb testing.TB
	ns *netns.NS
}

func scratchPlanes(t *testing.T, _ uint64) (plane, fresh history.Plane) {
	t.Helper()
	return scratchPlane{t, netnstest.New(t)}, scratchPlane{t, netnstest.New(t)}
}

// Config implements history.Plane.
func (p scratchPlane) Config() proxier.Config {
	return proxier.Config{NetNS: p.ns.Path(), Masquerade: proxier.Masquerade{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}}}
}

// Engines implements history.Plane: each run of nft goes through calls.
func (p scratchPlane) Engines(config proxier.Config, calls *history.Calls) (map[v1.IPFamily]proxier.Engine, error) {
	run := nftIn(p.ns.Path())
	engines := map[v1.IPFamily]proxier.Engine{}
	for _, family := range families {
		engines[family] = newScratch(config, family, func(ctx context.Context, input string, args ...string) (output string, err error) {
			err = calls.Do(func() error { output, err = run(ctx, input, args...); return err })
			return output, err
		})
	}
	return engines, nil
}

// Kernel implements history.Plane.
func (p scratchPlane) Kernel() (text string, err error) {
	for _, family := range families {
		table, listErr := newScratch(proxier.Config{}, family, nftIn(p.ns.Path())).list(context.Background())
		text, err = text+table, errors.Join(err, listErr)
	}
	return text, err
}

// Damage implements history.Plane.
func (p scratchPlane) Damage(number int, _ *history.Objects) {
	family := []string{"ip", "ip6"}[number%2]
	command := []string{
		"delete table %s scratch", "flush chain %s scratch services", "flush chain %s scratch prerouting",
		"add rule %s scratch services counter drop", "add chain %s scratch other",
	}[number/2%5]
	_, _ = nftIn(p.ns.Path())(context.Background(), fmt.Sprintf(command, family), "-f", "-") // there may be no table
}

// An engine from scratch is right in histories, verifies and watches itself.
func TestAnEngineFromScratchHasRightHistories(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]func(t *testing.T){
		"histories": func(t *testing.T) { t.Helper(); history.Test(t, 2, 1, scratchPlanes) },
		"each call": func(t *testing.T) { t.Helper(); history.TestEachCall(t, scratchPlanes) },
		"verify":    func(t *testing.T) { t.Helper(); history.TestVerify(t, scratchPlanes) },
		"watch":     func(t *testing.T) { t.Helper(); history.TestWatch(t, scratchPlanes) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t)
		})
	}
}

// Its packets follow the rules that it has, and one of its author's own.
func TestAnEngineFromScratchForwards(t *testing.T) {
	t.Parallel()
	rules := []string{"PKT-01", "PKT-01/masquerade_all", "PKT-03", "PKT-05", "PKT-05/no_detector", "PKT-20", "PKT-20/no_detector", "ACME-1"}
	features := proxiertest.Features{
		Select:    func(name string) bool { return slices.Contains(rules, name) },
		Scenarios: []proxiertest.Scenario{moved()},
	}
	proxiertest.Conformance(t, features, func(config proxier.Config, deps proxier.Deps) (proxier.Provider, error) {
		deps = nodedeps.Complete(config, deps)
		engines := map[v1.IPFamily]proxier.Engine{}
		for _, family := range families {
			engines[family] = newScratch(config, family, nftIn(config.NetNS))
		}
		return proxier.New(config, deps, engines)
	})
}

// moved is a scenario of the author: a connection stays open when its Service gets another endpoint.
func moved() proxiertest.Scenario {
	slice := func(addr netip.Addr) *discovery.EndpointSlice {
		return proxiertest.Slice("acme", "web", discovery.AddressTypeIPv4,
			proxiertest.SlicePort("http", v1.ProtocolTCP, 8080), proxiertest.Endpoint(addr.String()))
	}
	service := proxiertest.Service("acme", "web", proxiertest.ClusterIPs("10.96.9.9"), proxiertest.Port("http", v1.ProtocolTCP, 80))
	return proxiertest.Scenario{
		Name:     "ACME-1",
		Services: []*v1.Service{service},
		Check: func(ctx context.Context, t *testing.T, network *proxiertest.Topology, p proxier.Provider) {
			t.Helper()
			pods, vip := network.LocalPods, netip.MustParseAddrPort("10.96.9.9:80")
			before, after := slice(pods[0].Addr(v1.IPv4Protocol)), slice(pods[1].Addr(v1.IPv4Protocol))
			p.OnEndpointSliceAdd(before)
			if err := proxiertest.Sync(ctx, p); err != nil {
				t.Fatal(err)
			}
			open, err := network.Client.Open(ctx, "tcp", vip, proxiertest.AskOptions{})
			if err != nil {
				t.Fatal(err)
			}
			defer open.Close()
			p.OnEndpointSliceUpdate(before, after)
			if err := proxiertest.Sync(ctx, p); err != nil {
				t.Fatal(err)
			}
			if answer, err := open.Ask(ctx); err != nil || answer.Server != pods[0].Name {
				t.Errorf("the open connection has an answer of %s, %v; want %s", answer.Server, err, pods[0].Name)
			}
			if answer, err := network.Client.Ask(ctx, "tcp", vip, proxiertest.AskOptions{}); err != nil || answer.Server != pods[1].Name {
				t.Errorf("a new connection has an answer of %s, %v; want %s", answer.Server, err, pods[1].Name)
			}
		},
	}
}
