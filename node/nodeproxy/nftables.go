package nodeproxy

import (
	"path"
	"slices"

	"github.com/spf13/pflag"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

// fastPathAnnotation lets established connections of a Service skip the node's rules, or not.
const fastPathAnnotation = "serviceplane.io/fast-path"

// The values of --nftables-fast-path.
const (
	fastPathOff       = "off"
	fastPathAnnotated = "annotated"
	fastPathAll       = "all"
)

// nftablesFlags are the flags of nftables alone: of the fast path, and of load balancer IPs.
type nftablesFlags struct {
	closeLoadBalancerIPs bool

	services string
	after    uint32
	devices  []string
}

func (p *nftablesFlags) register(f *pflag.FlagSet) {
	f.BoolVar(&p.closeLoadBalancerIPs, "nftables-close-load-balancer-ips", false, "reject packets to a load balancer IP at ports and protocols that no Service has there, unless it is an address of this node; by default they are routed as usual. Not for load balancer IPs that are addresses of nodes")
	f.StringVar(&p.services, "nftables-fast-path", fastPathOff, "Services whose established connections skip the rules of this node, also those of other programs: off, annotated (with "+fastPathAnnotation+": \"true\") or all (but those with \"false\")")
	f.Uint32Var(&p.after, "nftables-fast-path-after", 20, "packets after which a connection takes the fast path, for --nftables-fast-path") //nolint:mnd // a default
	f.StringSliceVar(&p.devices, "nftables-fast-path-devices", nil, "patterns of the names of network devices that take part in the fast path, such as eth*; default is all but loopback")
}

func (p *nftablesFlags) validate(f *faults) {
	f.check(slices.Contains([]string{fastPathOff, fastPathAnnotated, fastPathAll}, p.services), "nftables-fast-path", p.services, "off, annotated or all")
	f.check(p.after > 0, "nftables-fast-path-after", p.after, "1 or more")
	f.checkPatterns("nftables-fast-path-devices", p.devices)
	f.check(len(p.devices) == 0 || p.services != fastPathOff, "nftables-fast-path-devices", p.devices, "nothing without --nftables-fast-path")
}

// config is the engine's configuration.
func (p *nftablesFlags) config(config proxier.Config) nftables.Config {
	c := nftables.Config{Config: config, CloseLoadBalancerIPs: p.closeLoadBalancerIPs}
	if p.services == fastPathOff {
		return c
	}
	c.FastPathAfter = p.after
	c.FastPathDevice = matching(p.devices)
	return c
}

// checkPatterns checks patterns of names.
func (f *faults) checkPatterns(flag string, patterns []string) {
	for _, pattern := range patterns {
		_, err := path.Match(pattern, "")
		f.check(err == nil && pattern != "", flag, pattern, "patterns such as eth*")
	}
}

// matching chooses the names that match one of the patterns; it is nil if there is none.
func matching(patterns []string) func(name string) bool {
	if len(patterns) == 0 {
		return nil
	}
	return func(name string) bool {
		return slices.ContainsFunc(patterns, func(pattern string) bool {
			matches, _ := path.Match(pattern, name) // checkPatterns has checked it
			return matches
		})
	}
}

// decorate is a changetracker.Options.DecorateService.
func (p *nftablesFlags) decorate(a *annotations, port *changetracker.ServicePort, s *v1.Service) {
	if p.services == fastPathOff {
		return
	}
	asks, ok := a.truth(s, fastPathAnnotation)
	port.FastPath = asks || !ok && p.services == fastPathAll
}
