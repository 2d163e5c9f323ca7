// Package nodedeps provides the proxier.Deps that every engine for a kernel needs: the
// deletion of stale flows, health check node ports and the node's addresses. New of
// nftables, iptables and ipvs calls it. A program that passes an engine of its own to
// proxier.New calls it like this:
//
//	p, err := proxier.New(config, nodedeps.Complete(config, deps), engines)
//
// Without Conntrack, a UDP client that does not pause keeps an endpoint that is gone.
// Without Health, load balancers get no answer at health check node ports. Surroundings tells of kernel
// settings that are in the way, to a program that wants it. The package
// builds on all platforms; conntrack entries are deleted on Linux only.
package nodedeps

import (
	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/internal/lightdeps"
	"github.com/serviceplane/serviceplane/proxier"
)

// Complete sets Conntrack, Health and LocalAddresses where they are nil, for the network
// namespace of config. A program whose engine terminates connections itself sets Conntrack
// back to nil.
func Complete(config proxier.Config, deps proxier.Deps) proxier.Deps {
	if deps.Conntrack == nil {
		deps.Conntrack = conntrack.New(conntrack.Options{NetNS: config.NetNS, Table: config.WithDefaults().Names.Table + ".ending"})
	}
	return lightdeps.Complete(deps, config.NetNS)
}
