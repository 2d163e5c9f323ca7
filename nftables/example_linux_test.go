package nftables_test

import (
	"context"
	"log"
	"os"
	"os/signal"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

// What an embedding program writes. The README shows this body.
func ExampleNew() {
	var service *v1.Service
	var slice *discovery.EndpointSlice

	// README
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()

	config := nftables.Config{Config: proxier.Config{
		Node:  changetracker.Node{Name: "node-1", Zone: "zone-a"},
		Names: proxier.KubeProxyNames(), // or NamesFor("mine"), beside a kube-proxy
	}}
	p, err := nftables.New(config, proxier.Deps{Logger: zap.NewExample()})
	if err != nil {
		log.Panic(err)
	}

	// Call these from your informers' handlers, and the Update and Delete ones; or
	// let package informer do it: informer.Bind(factory, p, informer.Options{}).
	p.OnServiceAdd(service)
	p.OnEndpointSliceAdd(slice)
	// Nothing is written before both of these.
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()

	if err := p.Run(ctx); err != nil { // returns when ctx ends; the rules stay
		log.Panic(err)
	}
	// README
}
