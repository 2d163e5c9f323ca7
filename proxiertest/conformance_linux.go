package proxiertest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/runner"
)

// Conformance tests a data plane by the rules PKT-… of docs/RULES.md. It gives Services
// to Providers of the factory. Then every kind of client sends packets to every kind of
// address, over IPv4 and IPv6, TCP and UDP. A subtest has the name of its rule, such as
// "PKT-22/IPv6/UDP/client_to_nodePort". Features declare where the data plane differs.
//
// It needs Linux and root.
func Conformance(t *testing.T, features Features, factory Factory) {
	t.Helper()
	ctx := t.Context()
	s := newSuite(t, features, factory, nil)
	if features.Prepare != nil {
		var pods []string
		for _, pod := range s.world.LocalPods {
			pods = append(pods, pod.NetNS())
		}
		features.Prepare(s.world.Node.NetNS(), pods)
	}
	for _, scenario := range scenarios(features) {
		s.test(t, scenario.name, func(t *testing.T) { s.run(ctx, t, scenario) })
	}
	for i := range features.Scenarios {
		s.test(t, features.Scenarios[i].Name, func(t *testing.T) { s.runOwn(ctx, t, &features.Scenarios[i]) })
	}
}

// test runs a scenario as a subtest, unless the Features leave it out.
func (s *suite) test(t *testing.T, name string, run func(*testing.T)) {
	t.Helper()
	if s.features.Select != nil && !s.features.Select(name) {
		return
	}
	t.Run(name, func(t *testing.T) {
		for prefix, reason := range s.features.Skip {
			if name == prefix || strings.HasPrefix(name, prefix+"/") {
				t.Skip(reason)
			}
		}
		run(t)
	})
}

// scenarios returns all scenarios, sorted by setup.
func scenarios(f Features) []scenario {
	all := slices.Concat(
		clusterIPScenarios(), clusterIPPolicyScenarios(), serviceAddressScenarios(f), unproxiedScenarios(), vipOnlyScenarios(),
		externalScenarios(), refusedScenarios(), disputeScenarios(), externalPolicyScenarios(f), healthCheckScenarios(f), loadBalancerScenarios(), emptyScenarios(f),
		nodePortScenarios(f), loopbackScenarios(f), sourceRangeScenarios(), emptySourceRangeScenarios(f),
		conditionScenarios(f), affinityScenarios(f), balancingScenarios(f), endingScenarios(), flowScenarios(f), spreadScenarios(), extremeScenarios(f),
		canaryScenarios(), priorityScenarios(f), endScenarios(),
	)
	slices.SortStableFunc(all, func(a, b scenario) int { return strings.Compare(string(a.setup), string(b.setup)) })
	return all
}

// setup is one way to configure the Provider.
type setup string

// The default detects pods by the cluster's pod CIDRs, and accepts node ports at all
// addresses.
const (
	setupDefault       setup = ""
	setupMasqueradeAll setup = "masquerade all"
	setupNoDetector    setup = "no detector"
	setupNodePodCIDRs  setup = "node pod CIDRs"
	setupInterfaces    setup = "interface prefix"
	setupInterface     setup = "interface"
	setupAddresses     setup = "node port addresses"
	setupPrimary       setup = "primary node port address"
	setupLocalhost     setup = "node ports at localhost too"
	setupTwoAddresses  setup = "second address known"
	setupNoPodCIDRs    setup = "unknown pod CIDRs of the node"
	setupStrictRanges  setup = "strict source ranges"
	setupDenyNode      setup = "no external IPs of the node"
	setupNoClusterIPs  setup = "no ClusterIPs beside other addresses"
)

func (s setup) config(world *Topology) proxier.Config {
	config := world.Config()
	config.Runner = runner.Options{MinInterval: runner.Unlimited}
	config.Tracker.DecorateService, config.Tracker.DecorateEndpoint = chooseBalancing, chooseWeight
	switch s {
	case setupDefault:
	case setupMasqueradeAll:
		config.Masquerade.All = true
	case setupNoDetector:
		config.Masquerade = proxier.Masquerade{}
	case setupNodePodCIDRs:
		config.Masquerade = proxier.Masquerade{NodePodCIDRs: true}
	case setupInterfaces:
		config.Masquerade = proxier.Masquerade{PodInterfacePrefix: "pod"}
	case setupInterface:
		config.Masquerade = proxier.Masquerade{PodInterface: "pod0"}
	case setupAddresses:
		config.NodePorts.Addresses = prefixes(config.Node.Addresses, 32, 128)
	case setupTwoAddresses:
		config.Node.Addresses = world.Node.Addrs[:4]
	case setupPrimary:
		config.NodePorts.Primary = true
	case setupLocalhost:
		config.NodePorts = proxier.NodePorts{Primary: true, Localhost: true}
	case setupNoPodCIDRs:
		config.Node.PodCIDRs = nil
	case setupStrictRanges:
		config.Tracker.StrictSourceRanges = true
	case setupDenyNode:
		config.DenyNodeExternalIPs = true
	case setupNoClusterIPs:
		config.Tracker.DecorateService = func(p *changetracker.ServicePort, s *v1.Service) {
			chooseBalancing(p, s)
			dropClusterIP(p, s)
		}
	}
	return config
}

func dropClusterIP(p *changetracker.ServicePort, s *v1.Service) {
	if s.Annotations[annotationKeep] == "" && p.ExternallyAccessible() {
		p.ClusterIP = netip.Addr{}
	}
}

// setups are all of them.
func setups() []setup {
	return []setup{
		setupDefault, setupMasqueradeAll, setupNoDetector, setupNodePodCIDRs, setupInterfaces, setupInterface,
		setupAddresses, setupPrimary, setupLocalhost, setupNoPodCIDRs, setupStrictRanges, setupDenyNode, setupNoClusterIPs,
	}
}

// suite runs scenarios. One goroutine uses it at a time.
type suite struct {
	// adjust, if not nil, changes the Providers' configurations.
	adjust   func(*proxier.Config)
	world    *Topology
	features Features
	factory  Factory
	running  *running
	serial   int // number of the last Service
}

// newSuite returns a suite that ends with the test.
func newSuite(t *testing.T, features Features, factory Factory, adjust func(*proxier.Config)) *suite {
	t.Helper()
	s := &suite{world: NewTopology(t), features: features, factory: factory, adjust: adjust}
	ctx := context.WithoutCancel(t.Context())
	t.Cleanup(func() { s.stop(ctx, t) })
	return s
}

// running is a Provider whose Run has not returned.
type running struct {
	setup    setup
	provider proxier.Provider
	cancel   context.CancelFunc
	ended    chan error
}

// use returns the running Provider of a setup. It stops the one of another setup.
func (s *suite) use(ctx context.Context, t *testing.T, wanted setup) proxier.Provider {
	t.Helper()
	if s.running != nil && s.running.setup == wanted {
		return s.running.provider
	}
	if s.running != nil { // deletes the services of the last scenario, and nothing else
		if err := Sync(ctx, s.running.provider); err != nil {
			t.Errorf("last sync with setup %q: %v", s.running.setup, err)
		}
	}
	s.stop(ctx, t)
	config := wanted.config(s.world)
	if s.adjust != nil {
		s.adjust(&config)
	}
	return s.start(ctx, t, wanted, config)
}

// start makes a Provider without Services, and runs it until end.
func (s *suite) start(ctx context.Context, t *testing.T, wanted setup, config proxier.Config) proxier.Provider {
	t.Helper()
	provider, err := s.factory(config, proxier.Deps{})
	if err != nil {
		t.Fatalf("the factory with setup %q: %v", wanted, err)
	}
	ctx, cancel := context.WithCancel(ctx)
	s.running = &running{setup: wanted, provider: provider, cancel: cancel, ended: make(chan error, 1)}
	go func(ended chan<- error) { ended <- provider.Run(ctx) }(s.running.ended)
	provider.OnServiceSynced()
	provider.OnEndpointSlicesSynced()
	if err := Sync(ctx, provider); err != nil {
		t.Fatalf("first sync with setup %q: %v", wanted, err)
	}
	return provider
}

// end stops the running Provider, and leaves what it programmed. It returns nil if there
// is none.
func (s *suite) end(t *testing.T) (last *running) {
	t.Helper()
	if last, s.running = s.running, nil; last == nil {
		return nil
	}
	last.cancel()
	if err := <-last.ended; err != nil {
		t.Errorf("Run with setup %q: %v", last.setup, err)
	}
	return last
}

func (s *suite) stop(ctx context.Context, t *testing.T) {
	t.Helper()
	last := s.end(t)
	if last == nil {
		return
	}
	if err := last.provider.Cleanup(ctx); err != nil {
		t.Errorf("Cleanup with setup %q: %v", last.setup, err)
	}
}

func (s *suite) run(ctx context.Context, t *testing.T, sc scenario) {
	t.Helper()
	st := &stage{suite: s, provider: s.use(ctx, t, sc.setup)}
	if sc.serviceCIDRs != nil {
		st.provider.OnServiceCIDRsChanged(sc.serviceCIDRs)
		defer st.provider.OnServiceCIDRsChanged(nil)
	}
	st.publish(ctx, t, sc.services...)
	defer st.withdraw() // the next scenario's sync deletes them
	switch {
	case sc.play != nil:
		sc.play(ctx, t, st)
	case sc.check != nil:
		st.report(t, sc.combos(), func(c combo) []result { return sc.check(ctx, st, c) })
	default:
		st.probe(ctx, t, sc)
	}
	s.verify(ctx, t)
	if t.Failed() {
		t.Log(sc.rule)
		if hint := sc.hint(st.provider.Status()); hint != "" {
			t.Log(hint)
		}
	}
}

// runOwn runs a scenario of the engine's author.
func (s *suite) runOwn(ctx context.Context, t *testing.T, own *Scenario) {
	t.Helper()
	s.stop(ctx, t)
	config := setupDefault.config(s.world)
	if own.Config != nil {
		own.Config(&config)
	}
	st := &stage{suite: s, provider: s.start(ctx, t, setup(own.Name), config)}
	defer s.stop(ctx, t)
	for _, service := range own.Services {
		st.provider.OnServiceAdd(service)
	}
	for _, slice := range own.Slices {
		st.provider.OnEndpointSliceAdd(slice)
	}
	st.sync(ctx, t)
	own.Check(ctx, t, s.world, st.provider)
	s.verify(ctx, t)
}

// verify checks that the kernel holds what is programmed, if the engine can tell. The engine may
// not have noticed yet that the node has another address.
func (s *suite) verify(ctx context.Context, t *testing.T) {
	t.Helper()
	if s.running == nil {
		return
	}
	provider, ok := s.running.provider.(interface {
		Verify(ctx context.Context) (map[v1.IPFamily]proxier.Verification, error)
	})
	if !ok {
		return
	}
	poll.Nil(t, "the kernel holds what is programmed", func() error {
		results, err := provider.Verify(ctx)
		for family, v := range results {
			if !v.Agrees() && !errors.Is(v.Err, errors.ErrUnsupported) {
				err = errors.Join(err, v.Err, fmt.Errorf("%s: %d differences: %v", family, v.Total, v.Differences))
			}
		}
		return err
	})
}

// hint returns why the scenario must fail with a Provider that lacks a dependency.
func (sc *scenario) hint(status proxier.Status) string {
	if !slices.Contains(status.Without, sc.needs) {
		return ""
	}
	return "Deps." + sc.needs + " of the Provider is nil: give proxier.New what nodedeps.Complete returns"
}

// probe sends the packets of all probes at once, because most of the time passes in
// waiting until a packet counts as dropped. It reports the probes one by one.
func (s *stage) probe(ctx context.Context, t *testing.T, sc scenario) {
	t.Helper()
	s.report(t, sc.combos(), func(c combo) []result {
		return together(sc.probes, func(p probe) result { return result{name: p.name(), err: s.attempt(p, c).run(ctx)} })
	})
}

// together calls a function for all items at once.
func together[T, R any](items []T, do func(T) R) []R {
	results := make([]R, len(items))
	var all sync.WaitGroup
	for i, item := range items {
		all.Go(func() { results[i] = do(item) })
	}
	all.Wait()
	return results
}

func (p probe) name() string {
	name := string(p.from) + "_to_" + string(p.to)
	if p.service > 0 {
		name += "_of_second_service"
	}
	return name
}

func (s *stage) attempt(p probe, c combo) *attempt {
	return &attempt{
		from:    s.sender(p.from, c.family),
		network: c.network,
		to:      s.services[p.service].targets(s.world, c.family)[p.to],
		want:    p.want,
		world:   s.world,

		features: s.features,
	}
}

// result is the outcome of a probe, or of another check with a name.
type result struct {
	name string
	err  error
}

// report runs a check for all combos at once, and then one subtest for each of
// its results.
func (s *stage) report(t *testing.T, all []combo, check func(combo) []result) {
	t.Helper()
	for i, results := range together(all, check) {
		for _, r := range results {
			t.Run(all[i].String()+"/"+r.name, func(t *testing.T) {
				if r.err != nil {
					t.Error(r.err)
				}
			})
		}
	}
}

// single returns the outcome of a check that has no parts.
func single(name string, errs ...error) []result {
	return []result{{name: name, err: errors.Join(errs...)}}
}

// serviceCIDRs are the ranges of ClusterIPs.
func serviceCIDRs() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")}
}
