package nftables_test

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// More endpoints than the rules take are a problem: one for the service port and one line in the log, however often
// its endpoints change, and none when there are fewer.
func TestMoreEndpointsThanTheRulesTakeAreAProblem(t *testing.T) {
	core, logs := observer.New(zap.WarnLevel)
	config := nftables.Config{Config: proxier.Config{NetNS: netnstest.New(t).Path(), Families: []v1.IPFamily{v1.IPv4Protocol}}}
	p, err := nftables.New(config, proxier.Deps{Health: proxier.NoHealth(), Logger: zap.New(core)})
	netnstest.Check(t, err)
	p.OnServiceAdd(proxiertest.Service("test", "web", proxiertest.ClusterIPs("10.96.77.77"), proxiertest.Port("http", v1.ProtocolTCP, 80), proxiertest.ClientAffinity(time.Hour)))
	slice := func(n, size int) *discovery.EndpointSlice {
		options := []proxiertest.SliceOption{proxiertest.SliceName(fmt.Sprintf("web-%d", n)), proxiertest.SlicePort("http", v1.ProtocolTCP, 80)}
		for i := range size {
			options = append(options, proxiertest.Endpoint(fmt.Sprintf("10.20.%d.%d", n*4+i/250, 1+i%250)))
		}
		return proxiertest.Slice("test", "web", discovery.AddressTypeIPv4, options...)
	}
	for n := range 9 {
		p.OnEndpointSliceAdd(slice(n, 1000))
	}
	proxiertest.Run(t, p)
	for i := range 5 {
		p.OnEndpointSliceAdd(slice(8, 1000-i))
		netnstest.Check(t, proxiertest.Sync(t.Context(), p))
		problems := p.Status().Problems
		if len(problems) != 1 || problems[0].Object != "Service test/web" || problems[0].Reason != changetracker.ReasonTooMany || !strings.Contains(problems[0].Value, "7935") {
			t.Fatalf("problems %+v, want that of the endpoints beyond 7935", problems)
		}
	}
	if n := logs.FilterMessageSnippet("not programmed in full").Len(); n != 1 || logs.Len() > 2 {
		t.Errorf("log %v, want one line", logs.All())
	}
	p.OnEndpointSliceDelete(slice(8, 1000))
	p.OnEndpointSliceDelete(slice(7, 1000))
	netnstest.Check(t, proxiertest.Sync(t.Context(), p))
	if problems := p.Status().Problems; len(problems) != 0 {
		t.Errorf("problems %+v with 7000 endpoints, want none", problems)
	}
}

// TestTheLongestNameOfATable: what is valid can be programmed, with all that appends to the name.
func TestTheLongestNameOfATable(t *testing.T) {
	names := proxier.DefaultNames()
	longest := 255 // of the kernel
	for ; ; longest-- {
		names.Table = strings.Repeat("a", longest)
		if (proxier.Config{Names: names}).WithDefaults().Validate() == nil {
			break
		}
	}
	if longest > 255-len(".ipvs-leaving") {
		t.Fatalf("names of %d bytes are valid", longest)
	}
	for what, with := range map[string]func(c *nftables.Config){
		"plain":            func(*nftables.Config) {},
		"CountConnections": func(c *nftables.Config) { c.CountConnections = true },
		"SourceHash": func(c *nftables.Config) {
			c.Tracker.DecorateService = func(p *changetracker.ServicePort, _ *v1.Service) { p.Balancing = changetracker.SourceHash }
		},
		"EndConnections": func(c *nftables.Config) {
			c.Tracker.DecorateService = func(p *changetracker.ServicePort, _ *v1.Service) { p.EndConnections = true }
		},
	} {
		config := nftables.Config{Config: proxier.Config{NetNS: netnstest.New(t).Path(), Names: names, Families: []v1.IPFamily{v1.IPv4Protocol}}}
		with(&config)
		p, err := nftables.New(config, proxier.Deps{Health: proxier.NoHealth()})
		netnstest.Check(t, err)
		p.OnServiceAdd(proxiertest.Service("test", "web", proxiertest.ClusterIPs("10.96.77.77"), proxiertest.Port("http", v1.ProtocolTCP, 80)))
		proxiertest.Run(t, p)
		if err := proxiertest.Sync(t.Context(), p); err != nil || len(p.Status().Conditions) > 0 {
			t.Errorf("%s: error %v, conditions %+v", what, err, p.Status().Conditions)
		}
	}
}

// A set of another program is not counted, although it has the name of ours and shorter keys.
func TestASetOfAnotherProgramIsNotCounted(t *testing.T) {
	ns := netnstest.New(t)
	config := nftables.Config{Config: proxier.Config{NetNS: ns.Path(), Families: []v1.IPFamily{v1.IPv4Protocol}, CountConnections: true}}
	e, err := nftables.NewEngine(config, v1.IPv4Protocol, proxier.Deps{})
	netnstest.Check(t, err)
	defer func() { netnstest.Check(t, e.Close()) }()
	_, err = e.Apply(t.Context(), desired.Update{Family: v1.IPv4Protocol, Full: true})
	netnstest.Check(t, err)
	netnstest.Check(t, ns.Do(func() error {
		return exec.CommandContext(t.Context(), "nft", `delete table ip serviceplane; add table ip serviceplane
add set ip serviceplane endpoint-counters { type inet_service; flags dynamic; counter; }
add element ip serviceplane endpoint-counters { 80 counter packets 5 bytes 6 }`).Run()
	}))
	if counts, err := e.Abilities().Counts(t.Context()); err != nil || len(counts.ServicePorts) > 0 {
		t.Errorf("counts %+v, %v, want none", counts, err)
	}
}
