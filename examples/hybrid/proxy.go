package main

import (
	"context"
	"fmt"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/hybrid"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/node/nodedeps"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/userspace"
)

// engineAnnotation names the engine of a Service; the default is the kernel's.
const engineAnnotation = "serviceplane.example/engine"

const (
	kernel  = "nftables"
	sockets = "userspace"
)

// newProxy returns a proxy with two engines for each IP family. The userspace engine calls
// activate for a connection to a Service without endpoints, which waits for one.
func newProxy(config proxier.Config, activate func(context.Context, changetracker.ServicePortName), log *zap.Logger) (*proxier.Proxier, error) {
	config.Tracker.DecorateService = func(p *changetracker.ServicePort, s *v1.Service) { p.Ext = s.Annotations[engineAnnotation] }
	deps := nodedeps.Complete(config, proxier.Deps{Logger: log})
	engines := map[v1.IPFamily]proxier.Engine{}
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		engine, err := newEngine(config, family, activate, deps)
		if err != nil {
			return nil, fmt.Errorf("create engine of %s: %w", family, err)
		}
		engines[family] = engine
	}
	return proxier.New(config, deps, engines)
}

func newEngine(config proxier.Config, family v1.IPFamily, activate func(context.Context, changetracker.ServicePortName), deps proxier.Deps) (proxier.Engine, error) {
	inKernel, err := nftables.NewEngine(nftables.Config{Config: config}, family, deps)
	if err != nil {
		return nil, err
	}
	// The portals have their own table and mark. Their priority is higher than that of the
	// kernel's engine, which drops packets to unknown addresses in the Service CIDRs.
	config.Masquerade.Mark = 0x8000
	if config.Names, err = proxier.NamesFor("portals"); err != nil {
		return nil, err
	}
	inSockets, err := userspace.NewEngine(userspace.Config{
		Config: config, Hooks: userspace.Hooks{Activate: activate},
		Portals: func(family v1.IPFamily) (proxier.Engine, error) {
			return nftables.NewEngine(nftables.Config{Config: config, DNATPriority: -102}, family, deps)
		},
	}, family, deps)
	if err != nil {
		return nil, err
	}
	return hybrid.New(choose, hybrid.Member{Name: kernel, Engine: inKernel}, hybrid.Member{Name: sockets, Engine: inSockets})
}

// choose returns the engine of all frontends of a service port. It is called when the port changes.
func choose(s *desired.Service, _ desired.Kind) string {
	name, _ := changetracker.Ext[string](s.Port.Ext) // "" selects the first engine
	return name
}
