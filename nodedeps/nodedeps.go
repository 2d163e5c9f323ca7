// Package nodedeps has the proxier.Deps of a node: what every engine for a kernel needs
// beside it, so that packets fare as they should. New of nftables, iptables and ipvs
// takes it by itself; a program that gives an engine of its own to proxier.New does so:
//
//	p, err := proxier.New(config, nodedeps.Complete(config, deps), engines)
//
// Without Conntrack, a UDP client that does not pause stays with an endpoint that is
// gone. Without Health, load balancers get no answer at health check node ports. It
// builds everywhere; conntrack entries are deleted on Linux only.
package nodedeps

import (
	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/internal/lightdeps"
	"github.com/serviceplane/serviceplane/proxier"
)

// Complete returns deps with Conntrack, Health and LocalAddresses set where they are nil,
// for the network namespace of config. An engine that ends connections itself, as a
// proxy of sockets does, sets Conntrack back to nil.
func Complete(config proxier.Config, deps proxier.Deps) proxier.Deps {
	if deps.Conntrack == nil {
		deps.Conntrack = conntrack.New(conntrack.Options{NetNS: config.NetNS})
	}
	return lightdeps.Complete(deps, config.NetNS)
}
