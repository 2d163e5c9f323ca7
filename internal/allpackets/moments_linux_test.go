package allpackets

import (
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/oracle"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/proxier"
)

// TestNothingLeaksDuringAChange: iptables commits several times for a change. After each
// commit, each packet fares as before the change or as after it: what was refused and will be
// forwarded is never let through untranslated. nftables has one transaction for a change of one service port.
func TestNothingLeaksDuringAChange(t *testing.T) {
	for _, variant := range []iptables.Variant{iptables.VariantNFT, iptables.VariantLegacy} {
		t.Run(string(variant), func(t *testing.T) {
			directory, seen, seed := saveAfterEachCommit(t, string(variant)), map[string]int{}, seedOf(t)
			for i := range *seeds {
				m := newMaker(seed + uint64(i))
				c := m.cluster()
				d := newDirect(t, variant, c, netnstest.New(t))
				for range 3 {
					before := copied(c)
					forget(t, directory)
					m.change(c, d)
					d.apply(t, c)
					checkMoments(t, directory, before, c, seen)
				}
			}
			t.Logf("%v", seen)
			if seen["commits"] < 10 || seen["refused to forward"] < 100 || seen["forward to refused"] < 100 {
				t.Errorf("seen %v, want more", seen)
			}
		})
	}
}

// direct gives changes to engines all at once, where a Proxier may sync between two of them.
type direct struct {
	proxier.EventHandler // of which others are not called

	tracker  *changetracker.Tracker
	updaters map[v1.IPFamily]*desired.Updater
	engines  map[v1.IPFamily]proxier.Engine
	globals  map[v1.IPFamily]*desired.Globals
}

func newDirect(t *testing.T, variant iptables.Variant, c *oracle.Cluster, ns *netns.NS) *direct {
	t.Helper()
	tracker, err := changetracker.New(changetracker.Options{ObjectOptions: c.Tracker()})
	if err != nil {
		t.Fatal(err)
	}
	d := &direct{
		tracker: tracker, updaters: map[v1.IPFamily]*desired.Updater{}, engines: map[v1.IPFamily]proxier.Engine{}, globals: map[v1.IPFamily]*desired.Globals{},
	}
	for _, family := range families() {
		engine, err := iptables.NewEngine(iptables.Config{Config: proxier.Config{NetNS: ns.Path()}, Variant: variant}, family, proxier.Deps{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = engine.Close() })
		d.updaters[family], d.engines[family] = desired.NewUpdater(), engine
	}
	for _, s := range c.Services {
		d.OnServiceAdd(s)
	}
	for _, s := range c.Slices {
		d.OnEndpointSliceUpdate(nil, s)
	}
	d.apply(t, c)
	return d
}

func (d *direct) OnServiceAdd(s *v1.Service)         { d.tracker.Services.Update(nil, s) }
func (d *direct) OnServiceUpdate(old, s *v1.Service) { d.tracker.Services.Update(old, s) }
func (d *direct) OnServiceDelete(s *v1.Service)      { d.tracker.Services.Update(s, nil) }
func (d *direct) OnNodeChange(changetracker.Node)    {}
func (d *direct) OnEndpointSliceUpdate(_, s *discovery.EndpointSlice) {
	d.tracker.Endpoints.EndpointSliceUpdate(s, false)
}

func (d *direct) OnEndpointSliceDelete(s *discovery.EndpointSlice) {
	d.tracker.Endpoints.EndpointSliceUpdate(s, true)
}

// apply is one sync of both families.
func (d *direct) apply(t *testing.T, c *oracle.Cluster) {
	t.Helper()
	d.tracker.SetNode(c.Node)
	resolver := desired.Resolver{Node: c.Node, MasqueradeAll: c.MasqueradeAll, DetectsPods: c.DetectsPods, DenyNodeExternalIPs: c.DenyNodeExternalIPs}
	for _, family := range families() {
		ofFamily := func(a netip.Addr) bool { return a.Is4() == (family == v1.IPv4Protocol) }
		globals := &desired.Globals{NodePortAddresses: desired.Minimal(c.NodePortAddresses, family)}
		if c.DetectsPods {
			globals.PodCIDRs = desired.Minimal(c.Node.PodCIDRs, family)
		}
		for _, a := range c.Node.Addresses {
			if ofFamily(a) {
				globals.NodeAddresses = append(globals.NodeAddresses, a)
			}
		}
		was := d.globals[family]
		err := d.tracker.Apply(family, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
			update := d.updaters[family].Next(delta, resolver, *globals, was == nil || !was.Equal(globals) || delta.Before.Node().Name != delta.After.Node().Name)
			result, err := d.engines[family].Apply(t.Context(), update)
			if err != nil || len(result.Failed) > 0 {
				t.Fatal(err, result.Failed)
			}
			d.updaters[family].Done(nil)
			return nil, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		d.globals[family] = globals
	}
}

func copied(c *oracle.Cluster) *oracle.Cluster {
	other := *c
	other.Services, other.Slices = maps.Clone(c.Services), maps.Clone(c.Slices)
	return &other
}

// saveAfterEachCommit puts programs in PATH that restore one commit after the other, and save
// to a file after each.
func saveAfterEachCommit(t *testing.T, variant string) (saved string) {
	t.Helper()
	directory, saved := t.TempDir(), t.TempDir()
	for _, program := range []string{"iptables", "ip6tables"} {
		program += "-" + variant
		restore, err := exec.LookPath(program + "-restore")
		if err != nil {
			t.Fatal(err)
		}
		save, err := exec.LookPath(program + "-save")
		if err != nil {
			t.Fatal(err)
		}
		script := fmt.Sprintf(`#!/bin/sh -e
parts=$(mktemp -d)
awk -v parts="$parts" '{print >(parts "/" n+0)} /^COMMIT/{n++}'
for part in "$parts"/*; do
	%s "$@" <"$part"
	%s >%s/%s.$(date +%%s%%N)
done
rm -r "$parts"
`, restore, save, saved, program)
		if err := os.WriteFile(filepath.Join(directory, program+"-restore"), []byte(script), 0o700); err != nil { //nolint:gosec // it must be executable
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", directory+":"+os.Getenv("PATH"))
	return saved
}

func forget(t *testing.T, directory string) {
	t.Helper()
	files, err := filepath.Glob(directory + "/*")
	for _, file := range files {
		err = os.Remove(file)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func checkMoments(t *testing.T, directory string, before, after *oracle.Cluster, seen map[string]int) {
	t.Helper()
	for _, family := range families() {
		pattern := "/iptables*"
		if family == v1.IPv6Protocol {
			pattern = "/ip6tables*"
		}
		files, err := filepath.Glob(directory + pattern)
		if err != nil {
			t.Fatal(err)
		}
		was, is := oracle.NewVerdicts(before, family), oracle.NewVerdicts(after, family)
		was.ServiceIPsPass, is.ServiceIPsPass = true, true
		for _, file := range files {
			saved, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			rules, err := parseRules(string(saved))
			if err != nil {
				t.Fatal(err)
			}
			seen["commits"]++
			for _, p := range packets(after, family, is) {
				checkMoment(t, rules, p, was, is, seen)
			}
		}
	}
}

func checkMoment(t *testing.T, rules ruleset, p oracle.Packet, was, is *oracle.Verdicts, seen map[string]int) {
	t.Helper()
	before, after, from, to := verdict(was.Of(p)), verdict(is.Of(p)), p.Source.Addr(), p.Destination.Addr()
	movesAddress := was.IsLocal(from) != is.IsLocal(from) || was.IsLocal(to) != is.IsLocal(to)
	if before == after && before == "pass" || movesAddress {
		return
	}
	seen[before+" to "+after]++
	got, err := outcomes(rules, p, is.IsLocal)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range got {
		closed := before == "pass" || after == "pass" // a VIP that comes or goes may refuse meanwhile
		if v := verdict([]oracle.Outcome{o}); v != before && v != after && (v != "refused" || !closed) {
			t.Fatalf("%v from %v (node: %v) to %v: %s before a change, %s after it, and meanwhile %v", p.Protocol, p.Source, p.FromNode, p.Destination, before, after, got)
		}
	}
}

// verdict does not tell reject from drop.
func verdict(all []oracle.Outcome) string {
	if v := all[0].Verdict; v != "drop" && v != "reject" {
		return v
	}
	return "refused"
}
