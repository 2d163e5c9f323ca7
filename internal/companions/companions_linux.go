// Package companions gives a Provider what goes with every engine of a node's
// kernel: connection tracking, health check node ports, and the node's addresses.
package companions

import (
	"context"
	"net"
	"net/netip"

	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/healthcheck"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/proxier"
)

// Complete returns deps with what is nil set, for the network namespace of a
// proxy.
func Complete(deps proxier.Deps, netNS string) proxier.Deps {
	addresses := func(context.Context) ([]netip.Addr, error) { return netlinkx.LocalAddresses(netNS) }
	if deps.Conntrack == nil {
		deps.Conntrack = conntrack.New(conntrack.Options{NetNS: netNS})
	}
	if deps.LocalAddresses == nil {
		deps.LocalAddresses = addresses
	}
	if deps.Health == nil {
		deps.Health = healthcheck.NewNodePorts(healthcheck.NodePortOptions{
			Addresses: addresses, Listen: listenIn(netNS), Logger: deps.Logger,
		})
	}
	return deps
}

// listenIn opens listeners in a network namespace.
func listenIn(netNS string) func(ctx context.Context, network, address string) (net.Listener, error) {
	return func(ctx context.Context, network, address string) (l net.Listener, err error) {
		err = netlinkx.Visit(netNS, func() error {
			var config net.ListenConfig
			l, err = config.Listen(ctx, network, address)
			return err
		})
		return l, err
	}
}
