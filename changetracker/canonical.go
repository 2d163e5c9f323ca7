package changetracker

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

// canonicalise validates a service port that did not come from the parser, one of so many of its Service, and brings it into
// canonical form. It changes the lists in place. The error names every invalid field; p must
// not be used then.
func (p *ServicePort) canonicalise(ports int) error {
	var errs []error
	invalid := func(field string, value any) {
		errs = append(errs, fmt.Errorf("%s: invalid value %v", field, value))
	}
	if !validProtocol(p.Name.Protocol) {
		invalid("Name.Protocol", p.Name.Protocol)
	}
	if p.Port == 0 {
		invalid("Port", p.Port)
	}
	if p.SessionAffinity < 0 {
		invalid("SessionAffinity", p.SessionAffinity)
	}
	if p.Balancing > LeastConnections {
		invalid("Balancing", p.Balancing)
	}
	if p.Failover.Share > maxShare {
		invalid("Failover.Share", p.Failover.Share)
	}
	if p.ClientLimit != (ClientLimit{}) {
		if err := p.ClientLimit.validate(); err != nil {
			errs = append(errs, fmt.Errorf("ClientLimit: %w", err))
		}
	}
	p.elsewhere = nil // of a State that p was copied from
	selector, err := ParseNodeSelector(string(p.ExposeOn))
	if p.ExposeOn = selector; err != nil {
		errs = append(errs, fmt.Errorf("ExposeOn: %w", err))
	}
	if p.ClusterIP = p.ClusterIP.Unmap(); !p.ClusterIP.IsValid() {
		p.InternalPolicyLocal = false
	}
	unmap(p.ExternalIPs)
	unmap(p.LoadBalancerVIPs)
	if err := p.findFamily(); err != nil {
		return errors.Join(append(errs, err)...)
	}
	p.CreationTimestamp = p.CreationTimestamp.Round(0).UTC()
	if errs = append(errs, p.canonicaliseLists()...); len(errs) == 0 {
		p.denySources(ports)
	}
	return errors.Join(errs...)
}

// canonicaliseLists is canonicalise for addresses and ranges.
func (p *ServicePort) canonicaliseLists() (errs []error) {
	fits := func(field string, value any, a netip.Addr, ok bool) {
		switch {
		case !ok:
			errs = append(errs, fmt.Errorf("%s: invalid value %v", field, value))
		case familyOf(a) != p.Family:
			errs = append(errs, fmt.Errorf("%s: %v is not of the family %s", field, value, p.Family))
		}
	}
	if p.ClusterIP.IsValid() {
		fits("ClusterIP", p.ClusterIP, p.ClusterIP, servable(p.ClusterIP))
	}
	for _, a := range p.ExternalIPs {
		fits("ExternalIPs", a, a, servable(a))
	}
	for _, a := range p.LoadBalancerVIPs {
		fits("LoadBalancerVIPs", a, a, servable(a))
	}
	sources := func(field string, ranges []netip.Prefix) {
		for i, r := range ranges {
			ranges[i] = canonicalPrefix(r)
			fits(field, r, ranges[i].Addr(), r.IsValid())
		}
	}
	sources("LoadBalancerSourceRanges", p.LoadBalancerSourceRanges)
	sources("DeniedSources", p.DeniedSources)
	p.ExternalIPs = canonicalAddrs(p.ExternalIPs)
	p.LoadBalancerVIPs = canonicalAddrs(p.LoadBalancerVIPs)
	p.LoadBalancerSourceRanges = canonicalPrefixes(p.LoadBalancerSourceRanges)
	return errs
}

// findFamily sets an empty Family to that of the first address.
func (p *ServicePort) findFamily() error {
	dialled := p.NodePort != 0
	for vip := range p.vips() {
		dialled = true
		if p.Family == "" {
			p.Family = familyOf(vip)
		}
	}
	_, known := familyIndex(p.Family)
	switch {
	case !dialled:
		return errors.New("no address and no node port: set ClusterIP, ExternalIPs, LoadBalancerVIPs or NodePort")
	case p.Family == "":
		return errors.New("Family: it is empty and there is no address to derive it from: set IPv4 or IPv6")
	case !known:
		return fmt.Errorf("Family: invalid value %q", p.Family)
	}
	return nil
}

// canonicalise validates a hand-built endpoint and copies its lists.
func (e *Endpoint) canonicalise(o *Options) error {
	e.Addr = netip.AddrPortFrom(e.Addr.Addr().Unmap(), e.Addr.Port())
	switch a := e.Addr.Addr(); {
	case !dialable(a) || e.Addr.Port() == 0:
		return fmt.Errorf("endpoint address: invalid value %v", e.Addr)
	case !o.mayServe(a):
		return fmt.Errorf("endpoint address: %v is a loopback or link-local address, which means a different machine on each node: use a routable address", e.Addr)
	case !e.Ready && !e.Serving && !e.Terminating:
		return fmt.Errorf("endpoint %v: it would get no traffic: none of Ready, Serving and Terminating is set: set Ready, or omit the endpoint", e.Addr)
	}
	e.tidy()
	e.ZoneHints, e.NodeHints = slices.Clone(e.ZoneHints), slices.Clone(e.NodeHints)
	return nil
}
