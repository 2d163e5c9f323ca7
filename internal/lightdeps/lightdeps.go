// Package lightdeps provides the proxier.Deps that every engine of a node needs and that
// have no heavy imports: health check node ports and the node's addresses.
package lightdeps

import (
	"context"
	"fmt"
	"net"
	"net/netip"

	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/node/healthcheck"
	"github.com/serviceplane/serviceplane/proxier"
)

// Complete sets Health and LocalAddresses where they are nil, for a network namespace. It
// does not set Conntrack, which not every engine needs.
func Complete(deps proxier.Deps, netNS string) proxier.Deps {
	addresses := func(context.Context) ([]netip.Addr, error) { return LocalAddresses(netNS) }
	if deps.LocalAddresses == nil {
		deps.LocalAddresses = addresses
	}
	if deps.Health == nil {
		deps.Health = healthcheck.NewNodePortServer(healthcheck.NodePortOptions{
			Addresses: addresses, Listen: listenIn(netNS), Logger: deps.Logger,
		})
	}
	return deps
}

// LocalAddresses returns the addresses of all interfaces in a network namespace, in the
// order of the interfaces.
func LocalAddresses(netNS string) ([]netip.Addr, error) {
	var list []net.Addr
	err := namespace.Visit(netNS, func() (err error) {
		list, err = net.InterfaceAddrs()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list the addresses of interfaces: %w", err)
	}
	addrs := make([]netip.Addr, 0, len(list))
	for _, a := range list {
		if prefix, err := netip.ParsePrefix(a.String()); err == nil {
			addrs = append(addrs, prefix.Addr().Unmap())
		}
	}
	return addrs, nil
}

// listenIn returns a function that opens listeners in a network namespace.
func listenIn(netNS string) func(ctx context.Context, network, address string) (net.Listener, error) {
	return func(ctx context.Context, network, address string) (l net.Listener, err error) {
		err = namespace.Visit(netNS, func() error {
			var config net.ListenConfig
			l, err = config.Listen(ctx, network, address)
			return err
		})
		return l, err
	}
}
