package proxier_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/runner"
)

// The proxy waits for the node if the configuration depends on unknown properties of the node: a first sync without
// them would remove node ports, or masquerade pods.
func TestTheNodeIsWaitedFor(t *testing.T) {
	addr, podCIDR := netip.MustParseAddr("192.0.2.1"), netip.MustParsePrefix("10.1.0.0/24")
	node := changetracker.Node{Name: "here", Addresses: []netip.Addr{addr}, PodCIDRs: []netip.Prefix{podCIDR}}
	primary, podCIDRs := proxier.NodePorts{Primary: true}, proxier.Masquerade{NodePodCIDRs: true}
	for name, c := range map[string]struct {
		config proxier.Config
		waits  bool
		knows  func(g *desired.Globals) bool // in the first update
	}{
		"nothing depends on it": {proxier.Config{}, false, func(*desired.Globals) bool { return true }},
		"primary address": {proxier.Config{NodePorts: primary}, true, func(g *desired.Globals) bool {
			return slices.Equal(g.NodePortAddresses, []netip.Prefix{netip.PrefixFrom(addr, 32)})
		}},
		"only the name is known":    {proxier.Config{NodePorts: primary, Node: changetracker.Node{Name: "here"}}, true, func(g *desired.Globals) bool { return len(g.NodePortAddresses) == 1 }},
		"primary address, known":    {proxier.Config{NodePorts: primary, Node: node}, false, func(g *desired.Globals) bool { return len(g.NodePortAddresses) == 1 }},
		"ranges of pods":            {proxier.Config{Masquerade: podCIDRs}, true, func(g *desired.Globals) bool { return slices.Equal(g.PodCIDRs, []netip.Prefix{podCIDR}) }},
		"ranges of pods, known":     {proxier.Config{Masquerade: podCIDRs, Node: node}, false, func(g *desired.Globals) bool { return len(g.PodCIDRs) == 1 }},
		"the program demands it":    {proxier.Config{Tracker: changetracker.ObjectOptions{AwaitNode: true}}, true, func(g *desired.Globals) bool { return len(g.NodeAddresses) == 1 }},
		"a node without the family": {proxier.Config{NodePorts: primary, Node: changetracker.Node{Addresses: []netip.Addr{netip.MustParseAddr("2001:db8::1")}}}, false, func(g *desired.Globals) bool { return len(g.NodePortAddresses) == 0 }},
	} {
		t.Run(name, func(t *testing.T) {
			c.config.NodeTimeout = runner.Never
			run(t, c.config, func(t *testing.T, f *fixture) {
				f.OnServiceAdd(service("a", "10.0.0.1"))
				f.synced()
				pass(time.Hour)
				if waiting := f.Status().Waiting; c.waits != slices.Equal(waiting, []changetracker.Input{changetracker.InputNode}) || c.waits != (len(f.v4.updates()) == 0) {
					t.Errorf("waiting for %v after %d updates, want to wait for the node: %t", waiting, len(f.v4.updates()), c.waits)
				}
				if c.waits {
					f.OnNodeChange(node)
					pass(time.Minute)
				}
				if updates := f.v4.updates(); len(updates) == 0 || !c.knows(&updates[0].Globals) || len(f.Status().Waiting) > 0 {
					t.Errorf("%d updates, waiting for %v, want a first one with the node", len(updates), f.Status().Waiting)
				}
			})
		})
	}
}

// The first sync goes on without the node after half a minute. Services work, a condition says what is missing
// until the node comes, and the node's ports follow.
func TestTheFirstSyncGoesOnWithoutTheNode(t *testing.T) {
	run(t, proxier.Config{NodePorts: proxier.NodePorts{Primary: true}}, func(t *testing.T, f *fixture) {
		missing := func() bool {
			return slices.ContainsFunc(f.Status().Conditions, func(c proxier.Condition) bool { return c.Type == proxier.ConditionNode })
		}
		f.OnServiceAdd(service("a", "10.0.0.1"))
		f.synced()
		pass(29 * time.Second)
		if n := len(f.v4.updates()); n > 0 || !missing() {
			t.Fatalf("after 29s: %d updates, condition %t, want none and true", n, missing())
		}
		pass(2 * time.Second)
		if n := len(f.v4.updates()); n != 1 || len(f.v4.last().Globals.NodePortAddresses) > 0 || !missing() {
			t.Fatalf("after 31s: %d updates, condition %t, want one without addresses, and true", n, missing())
		}
		for range 2 { // a Node without addresses is no help
			f.OnNodeChange(changetracker.Node{Name: "here"})
			pass(time.Second)
		}
		if !missing() {
			t.Error("no condition with a node without addresses")
		}
		f.OnNodeChange(changetracker.Node{Name: "here", Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}})
		pass(time.Second)
		if len(f.v4.last().Globals.NodePortAddresses) != 1 || missing() {
			t.Errorf("with the node: node ports at %v, condition %t, want one address, and false", f.v4.last().Globals.NodePortAddresses, missing())
		}
	})
}

// Node ports are accepted where any field says, and at localhost only if a field asks for it.
func TestNodePortsAreAcceptedWhereAnyFieldSays(t *testing.T) {
	prefixes := func(texts ...string) (all []netip.Prefix) {
		for _, text := range texts {
			all = append(all, netip.MustParsePrefix(text))
		}
		return all
	}
	node := changetracker.Node{Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}}
	for name, c := range map[string]struct {
		config proxier.NodePorts
		v4, v6 string // accepting ranges, and "+" if localhost accepts them
	}{
		"nothing is set":         {proxier.NodePorts{}, "[0.0.0.0/0]", "[::/0]"},
		"primary":                {proxier.NodePorts{Primary: true}, "[192.0.2.1/32]", "[2001:db8::1/128]"},
		"localhost alone":        {proxier.NodePorts{Localhost: true}, "[127.0.0.1/32]+", "[::1/128]+"},
		"primary and localhost":  {proxier.NodePorts{Primary: true, Localhost: true}, "[127.0.0.1/32 192.0.2.1/32]+", "[::1/128 2001:db8::1/128]+"},
		"primary and a range":    {proxier.NodePorts{Primary: true, Addresses: prefixes("198.51.100.0/24")}, "[192.0.2.1/32 198.51.100.0/24]", "[2001:db8::1/128]"},
		"all":                    {proxier.NodePorts{Addresses: prefixes("0.0.0.0/0", "::/0")}, "[0.0.0.0/0]", "[::/0]"},
		"all and localhost":      {proxier.NodePorts{Localhost: true, Addresses: prefixes("0.0.0.0/0", "::/0")}, "[0.0.0.0/0]+", "[::/0]+"},
		"a range with localhost": {proxier.NodePorts{Addresses: prefixes("127.0.0.0/8", "192.0.2.0/24")}, "[127.0.0.0/8 192.0.2.0/24]+", "[::/0]"},
		"another loopback range": {proxier.NodePorts{Addresses: prefixes("127.0.2.0/24", "::1/128")}, "[127.0.2.0/24]", "[::1/128]+"},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, proxier.Config{Node: node, NodePorts: c.config}, func(t *testing.T, f *fixture) {
				f.OnServiceAdd(service("a", "10.0.0.1"))
				f.synced()
				pass(time.Second)
				text := func(g desired.Globals) string {
					got := fmt.Sprint(g.NodePortAddresses)
					if g.LocalhostNodePorts {
						got += "+"
					}
					return got
				}
				if four, six := text(f.v4.last().Globals), text(f.v6.last().Globals); four != c.v4 || six != c.v6 {
					t.Errorf("node ports are accepted at %s and %s, want %s and %s", four, six, c.v4, c.v6)
				}
			})
		})
	}
}
