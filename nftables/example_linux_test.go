package nftables_test

import (
	"context"
	"fmt"
	"log"
	"net/netip"
	"os"
	"os/signal"
	"strings"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

// What an embedding program writes. The README shows this body.
func ExampleNew() {
	var service *v1.Service
	var slice *discovery.EndpointSlice

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()

	config := nftables.Config{Config: proxier.Config{
		// In kube-proxy's place: Names: proxier.KubeProxyNames(). Beside it: no Names, as here,
		// and a Masquerade.Mark of its own.
		Node:       changetracker.Node{Name: "node-1", Zone: "zone-a"},
		Masquerade: proxier.Masquerade{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}},
	}}
	p, err := nftables.New(config, proxier.Deps{Logger: zap.NewExample()})
	if err != nil {
		log.Panic(err)
	}

	// Call these from your informers' handlers, and the Update and Delete ones; or
	// let package informer do it: informer.Bind(informers, p, informer.Options{}).
	p.OnServiceAdd(service)
	p.OnEndpointSliceAdd(slice)
	// Nothing is written before both of these.
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()

	if err := p.Run(ctx); err != nil { // returns when ctx ends; the rules stay
		log.Panic(err)
	}
}

// A replaced endpoint is one element in the kernel, and no rule. Plan needs no privileges.
func ExampleNewEngine() {
	engine, err := nftables.NewEngine(nftables.Config{}, v1.IPv4Protocol, proxier.Deps{})
	if err != nil {
		fmt.Println(err)
		return
	}
	plan := func(endpoint string) string {
		web := &desired.Service{ // a desired.Resolver makes these
			Protocol: desired.TCP,
			Frontends: []desired.Frontend{{
				Kind: desired.ClusterIP, VIP: netip.MustParseAddr("10.96.0.10"), Port: 80,
				Scope: desired.ScopeCluster, Action: desired.Forward, Masquerade: desired.MasqueradeNone,
			}},
			Cluster: desired.EndpointsOf(netip.MustParseAddrPort("10.244.1.5:8080"), netip.MustParseAddrPort(endpoint)),
		}
		text, err := engine.Abilities().Plan(desired.Update{Family: v1.IPv4Protocol, Full: true, Changes: desired.ChangesTo(web)})
		if err != nil {
			fmt.Println(err)
		}
		return text
	}
	show := func(sign, plan, other string) {
		for line := range strings.Lines(plan) {
			if !strings.Contains(other, line) {
				fmt.Println(sign, strings.TrimSpace(line))
			}
		}
	}
	before, after := plan("10.244.2.7:8080"), plan("10.244.3.9:8080")
	show("-", before, after)
	show("+", after, before)
	// Output:
	// - 10.96.0.10 . tcp . 80 . 0x00000001 : 10.244.2.7 . 8080
	// + 10.96.0.10 . tcp . 80 . 0x00000001 : 10.244.3.9 . 8080
}
