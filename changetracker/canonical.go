package changetracker

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

// canonicalise validates values that did not come from our own parser and brings
// them into canonical form. It changes the lists in place. The error names every
// fault, and means that p must not be used.
func (p *ServicePort) canonicalise() error {
	var faults []error
	fault := func(field string, value any) {
		faults = append(faults, fmt.Errorf("%s: invalid value %v", field, value))
	}
	if !validProtocol(p.Name.Protocol) {
		fault("Name.Protocol", p.Name.Protocol)
	}
	if p.Port == 0 {
		fault("Port", p.Port)
	}
	if p.SessionAffinity < 0 {
		fault("SessionAffinity", p.SessionAffinity)
	}
	if p.ClusterIP = p.ClusterIP.Unmap(); !p.ClusterIP.IsValid() {
		p.InternalPolicyLocal = false
	}
	unmap(p.ExternalIPs)
	unmap(p.LoadBalancerVIPs)
	if err := p.findFamily(); err != nil {
		return errors.Join(append(faults, err)...)
	}
	fits := func(field string, value any, a netip.Addr, ok bool) {
		switch {
		case !ok:
			fault(field, value)
		case familyOf(a) != p.Family:
			faults = append(faults, fmt.Errorf("%s: %v is not of the family %s", field, value, p.Family))
		}
	}
	if p.ClusterIP.IsValid() {
		fits("ClusterIP", p.ClusterIP, p.ClusterIP, dialable(p.ClusterIP))
	}
	for _, a := range p.ExternalIPs {
		fits("ExternalIPs", a, a, dialable(a))
	}
	for _, a := range p.LoadBalancerVIPs {
		fits("LoadBalancerVIPs", a, a, dialable(a))
	}
	for i, r := range p.LoadBalancerSourceRanges {
		p.LoadBalancerSourceRanges[i] = canonicalPrefix(r)
		fits("LoadBalancerSourceRanges", r, p.LoadBalancerSourceRanges[i].Addr(), r.IsValid())
	}
	p.CreationTimestamp = p.CreationTimestamp.Round(0).UTC()
	p.ExternalIPs = canonicalAddrs(p.ExternalIPs)
	p.LoadBalancerVIPs = canonicalAddrs(p.LoadBalancerVIPs)
	p.LoadBalancerSourceRanges = canonicalPrefixes(p.LoadBalancerSourceRanges)
	return errors.Join(faults...)
}

// findFamily fills in the Family by the first address.
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
		return errors.New("there is nothing to dial: set ClusterIP, ExternalIPs, LoadBalancerVIPs or NodePort")
	case p.Family == "":
		return errors.New("Family: no address says which: set it")
	case !known:
		return fmt.Errorf("Family: invalid value %q", p.Family)
	}
	return nil
}

// canonicalise validates a hand-built endpoint and makes it our own.
func (e *Endpoint) canonicalise(o *Options) error {
	e.Addr = netip.AddrPortFrom(e.Addr.Addr().Unmap(), e.Addr.Port())
	switch a := e.Addr.Addr(); {
	case !dialable(a) || e.Addr.Port() == 0:
		return fmt.Errorf("endpoint address: invalid value %v", e.Addr)
	case !o.mayServe(a):
		return fmt.Errorf("endpoint address: %v is a loopback or link-local address, which means a different machine on each node: use a routable one", e.Addr)
	case !e.Ready && !e.Serving && !e.Terminating:
		return fmt.Errorf("endpoint %v: it would get no traffic, as none of Ready, Serving and Terminating is set: set Ready, or leave it out", e.Addr)
	}
	e.ZoneHints = slices.Clone(canonicalNames(e.ZoneHints))
	e.NodeHints = slices.Clone(canonicalNames(e.NodeHints))
	e.Weight = canonicalWeight(e.Weight)
	return nil
}
