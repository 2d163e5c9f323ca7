package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/examples/manifests"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/runner"
)

// objects holds the objects of a cluster.
type objects manifests.Objects

// feed passes the objects to a proxy, like informers.
func (o objects) feed(p provider) {
	for _, service := range o.Services {
		p.OnServiceAdd(service)
	}
	for _, slice := range o.Slices {
		p.OnEndpointSliceAdd(slice)
	}
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
}

// provider is any engine's proxy.
type provider = proxier.Provider

// nodeName is the node that the proxy runs on.
const nodeName = "node-1"

// config returns the proxy's configuration: its node and the pod CIDRs.
func (o objects) config() proxier.Config {
	return proxier.Config{
		Node: changetracker.Node{
			Name:      nodeName,
			Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8:2::10")},
		},
		Masquerade: proxier.Masquerade{PodCIDRs: o.podCIDRs()},
		Runner:     runner.Options{MinInterval: runner.Unlimited},
	}
}

// podCIDRs returns the networks of the endpoints and of the client pod.
func (o objects) podCIDRs() []netip.Prefix {
	addrs := []netip.Addr{netip.MustParseAddr(askingPod4), netip.MustParseAddr(askingPod6)}
	for _, slice := range o.Slices {
		for _, endpoint := range slice.Endpoints {
			for _, text := range endpoint.Addresses {
				if addr, err := netip.ParseAddr(text); err == nil {
					addrs = append(addrs, addr)
				}
			}
		}
	}
	var cidrs []netip.Prefix
	for _, addr := range addrs {
		bits := 24
		if addr.Is6() {
			bits = 64
		}
		if cidr := netip.PrefixFrom(addr, bits).Masked(); !slices.Contains(cidrs, cidr) {
			cidrs = append(cidrs, cidr)
		}
	}
	return cidrs
}

// Addresses of the client pod on the node.
const (
	askingPod4 = "10.244.1.200"
	askingPod6 = "fd00:10:244:1::200"
)

// running runs a proxy during f, and waits for its end. If the proxy ends, the context of f
// ends too.
func running(ctx context.Context, p provider, f func(context.Context) error) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() {
		ended <- p.Run(ctx)
		stop()
	}()
	err := f(ctx)
	stop()
	if runErr := <-ended; runErr != nil {
		return fmt.Errorf("run proxy: %w", runErr)
	}
	return err
}

// families returns the proxy's IP families.
func families() []v1.IPFamily { return []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} }
